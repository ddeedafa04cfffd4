"""The decider: what to do about what was found, as a pure function of events.

Read it in this order: ``events`` (what goes in and out), ``policy`` and policy.toml (the rules), ``picture`` (what is
known), ``conditions`` → ``incidents`` → ``drain`` along ``moves`` (how a finding becomes an action), ``repair`` (what mends
it), ``past`` (what repeats), ``budget``, ``systemic``, ``silence``, ``waiting`` and ``capacity`` (what holds an action back or
makes up for it), ``people`` (who has the last word), ``decider`` (the order in which all that happens).
No module here does I/O or reads a clock; import-linter checks it.
"""
