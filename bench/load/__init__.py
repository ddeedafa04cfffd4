"""What bench/controller.py puts around a controller: the process it runs in, and the agents that talk to it."""
