"""The decider's shell: what arrives becomes events, what is decided becomes durable, and only then is anything done.

This package exists so that everything which touches the network, the store, the disk or the clock on behalf of the decider
is in one place. What always holds: one task owns the decider; nothing is acknowledged or acted upon before it is durable
under this leader's epoch; a controller that may no longer lead does nothing more.
"""
