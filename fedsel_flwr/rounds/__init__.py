"""The course of a round in plain types: arrays, numbers and ids; no Flower, no torch.

Whatever carries a model to clients, Flower's two APIs or an engine in this process, stands on
:class:`~fedsel_flwr.rounds.core.SelectionCore`, whose three calls are a round: choose, collect, finish. The rooms, in
the order in which a round goes through them:

==================  =================================================================================================
``budget``          when a run ends before its rounds are over
``settings``        the options of a strategy, resolved once for every adapter
``numbering``       which absolute round the server means
``identity``        which texts can be client ids
``roster``          who is who: connections, client ids and the selector's rows; who is evicted for whom
``rollcall``        who is asked who it is, and when
``transport``       how connections are reached, and who the server says they are
``identifying``     by what clients are known: the server's word, or their own
``enrolment``       who is new, and what the selector is told about the clients
``client_values``   selector parameters that users give by client id and selectors read by row
``presence``        who takes part, beyond being connected
``busy``            who still works on something earlier
``cooldown``        who is left in peace after failures
``trial``           who joined later and has delivered nothing yet
``participation``   who was asked in too large a share of its last rounds
``probing``         what a selector asks before it chooses, and what the answers cost
``round``           what lives from the choice to the end
``untrusted``       values that clients sent, and what they may have meant
``vectors``         vectors that clients report: of one length
``clocks``          how long a client took: its word, or the server's time
``first_times``     the first time of each client, from which nothing is learnt
``arriving``        who answers in time: over-selection, the round's deadline
``replies``         which updates can be used, and which numbers can be believed
``models``          the models of a round, a list or a stack; which of them can be used
``norms``           how far clients' models are from the global one
``validation``      the server's examples, and how to run the model on them
``direction``       the direction in which the global model goes (GPFL)
``measuring``       what the server measures on the models
``faults``          the log's lines for them: some clients named, the rest counted
``collecting``      all of that for the replies of a round
``reporting``       the selector's report and the history's records
``records``         the history's rows
``lines``           a round as a line of JSON, and where a file's lines stand
``growing_file``    a file that is only added to
``ledger``          the file of finished rounds
``views``           records as sequences, read where they stand
``tally``           how often each client was selected and each problem met
``columnar``        records as columns, in states
``keeping``         where a history's records are: in memory, or the older ones in the ledger
``round_line``      the log's line for each round
``history``         what happened, round by round and client by client
``saving``          what the owners of lasting state have in common
``packing``         a state as JSON and arrays, and back
``disk``            files that are there whole or not at all
``locking``         one process writes into a folder
``checkpoint``      one checkpoint on the disk
``checkpoints``     which are written and kept, and which one a run goes on from
``parts``           who they are
``core``            the course of a round
==================  =================================================================================================
"""
