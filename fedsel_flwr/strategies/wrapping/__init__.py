"""Wrapping a Flower strategy: the parts of ``SelectionStrategy`` around the round itself, for both APIs.

The table lists the rooms in the order in which a run uses them. ``legacy_...`` belongs to the legacy API, ``grids``
and ``message_...`` to the Message API. Both APIs use the functions of ``grids``.

======================  =============================================================================================
``paper``               strategies named after a paper, which build their own selector
``adapter``             options, attributes and core of every strategy, and the steps of an aggregation in both APIs
``bases``               facts about base strategies: what each requires, reads and cannot be combined with
``resuming``            checkpoints of a run: when they are written, the fingerprint to match, and the base's state
``waiting``             bounded waiting: for clients to connect, for replies that hang, and for late ones
``arrivals``            the replies of the round in progress, on disk, for a server that is started again
``grids``               grids around Flower's: time nodes, and bound the waiting of a base strategy
``legacy_transport``    client managers, proxies, roll call, probes, results and parameters of the legacy API
``message_transport``   the roll call, probes and the round's messages of the Message API
``message_records``     records and messages, read into plain types and cleaned for a base strategy
``failure_reasons``     the meaning of Flower's errors and missing replies; dead actors of a simulation
``message_run``         a run of the Message API, in Flower's loop or in a base's own ``start``
``round_end``           the checkpoint, the central evaluation, ``on_round``, and the last model after an error
======================  =============================================================================================
"""
