"""What every room may use: errors, logging, facts about the machine."""
