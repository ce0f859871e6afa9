"""What AgentJet's users bring: their job files and their scripts."""
