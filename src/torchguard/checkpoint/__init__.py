"""What is on disk is whole: checkpoints that survive a kill, a full disk and a second writer."""
