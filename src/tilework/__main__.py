from tilework.cli import main

main()
