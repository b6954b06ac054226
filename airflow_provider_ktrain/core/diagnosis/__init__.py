"""From the evidence of a job to the one cause of its failure: `pod_failures` orders failures, rules explain them."""
