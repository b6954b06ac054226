"""From the evidence that a job leaves behind to the one cause of its failure."""
