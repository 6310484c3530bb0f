"""An executor over several nodes: an agent on each starts its workers; commands and reports travel as messages."""
