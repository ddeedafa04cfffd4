"""What the decider knows and has decided: events in, records out, and the one picture in between that every rule reads."""
