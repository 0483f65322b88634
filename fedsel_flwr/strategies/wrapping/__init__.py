"""Wrapping a Flower strategy: what ``SelectionStrategy`` of both APIs needs around the course of a round.

The table lists the rooms in the order in which a run goes through them. ``client_manager`` and ``legacy_...`` belong to
the legacy API, ``grids`` and ``message_...`` to the Message API; both APIs use the functions of ``grids``.

======================  =============================================================================================
``paper``               strategies named after a paper, which build their own selector
``adapter``             options and attributes of every strategy, and the core that they make
``bases``               facts about base strategies: what each asks for, reads and cannot be combined with
``resuming``            checkpoints of a run: when they are written, and the fingerprint that they must agree with
``base_state``          state of a base strategy in a checkpoint
``waiting``             bounded waiting for clients to connect, and for replies that come too late
``grids``               grids around Flower's: timing nodes, bounding a base strategy's waiting
``client_manager``      client managers and proxies around Flower's
``legacy_transport``    the roll call and probes of the legacy API
``message_transport``   the roll call, probes and the round's messages of the Message API
``legacy_results``      results and parameters, read into plain types and cleaned for a base strategy
``message_records``     the same for records and messages
``failure_reasons``     what Flower's errors and missing replies mean; dead actors of a simulation
``round_end``           the checkpoint, the central evaluation, ``on_round``, and the last model after an error
======================  =============================================================================================
"""
