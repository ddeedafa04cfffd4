"""From findings to faults: which sign belongs to which culprit, what repeats, what is systemic, what is only silence."""
