"""One worker's ways out of service and back: which response, what holds it back, repair, proof, and the people who outrank it."""
