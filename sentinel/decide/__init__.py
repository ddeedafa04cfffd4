"""The decider: what to do about what was found, as a pure function of events.

Each room knows those named before it and none after it: ``rules`` (the policy, policy.toml) and ``rack`` (where everything
stands); ``state`` (``events`` in, the ``picture``, what is ``written``); ``faults`` (how findings become one incident with
its culprit); ``supply`` (what there is to serve with, and how much doubt that affords); ``ways`` (a worker's way out of
service and back). Above the rooms stands what needs all of them: ``correlate`` and ``attribute`` (a culprit known late),
``capacity`` (where new sessions go), ``hearing`` (what comes in), ``tending``, ``reload``, ``replay``, ``explain``, and
``decider``: the order in which all is asked. No module here does I/O or reads a clock; import-linter checks both the order
and that.
"""
