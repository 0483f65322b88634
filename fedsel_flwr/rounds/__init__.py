"""The course of a round in plain types: arrays, numbers and ids; no Flower, no torch.

Whatever carries a model to clients, Flower's two APIs or an engine in this process, stands on
:class:`~fedsel_flwr.rounds.core.SelectionCore`, whose three calls are a round: choose, collect, finish. The rooms, in
the order in which a round goes through them:

===================  ================================================================================================
``core``             the round from end to end: choose, collect, finish; the owners of what outlives it
``settings``         the options of a strategy, resolved once for every adapter
``run_length``       the number of the round that the server means, and the end of the run
``roll_call``        new connections are asked who they are, through an adapter's transport
``registration``     new clients enter the roster, and the selector is informed of them
``roster``           connections, client ids and the selector's rows; selector parameters given by client id
``eligibility``      busy connections, cool-down, availability, newcomer quota, cap on participation
``probing``          what a selector asks before it chooses, and what the answers cost
``round``            one round: its cohort and outcome, the selector's report and the history's records
``collecting``       the replies of a round read, stragglers set apart, models measured, averaging decided
``replies``          which updates can be used, which numbers can be believed, and how long a client took
``untrusted``        values that clients sent, checked; the log's lines for their faults
``models``           the models of a round, a list or a stack; which of them can be used
``cold_starts``      the first time of each client, from which nothing is learnt
``measuring``        validation of the usable models, and the direction in which the global model moves (GPFL)
``history``          what happened, round by round and client by client
``records``          the history's rows, and a round as a line of JSON
``journal``          the file of finished rounds: the last ones in memory too, older ones read when asked for
``state_dicts``      saving, loading and forgetting, common to the owners of lasting state
``resumption``       whether a run begins, is resumed, is played again, returns its result, or is refused
``checkpoints``      which checkpoints are written and kept, a file each
``storage``          files that are whole or absent, and folders that one process writes into
===================  ================================================================================================
"""
