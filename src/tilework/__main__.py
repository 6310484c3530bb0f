from tilework.cli import start

start()
