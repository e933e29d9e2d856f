"""Every op runs in the precision that the policy says."""
