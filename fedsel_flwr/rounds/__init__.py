"""The steps of a round in plain types: arrays, numbers and ids; no Flower, no torch.

Three calls of :class:`~fedsel_flwr.rounds.core.SelectionCore` make a round: choose, collect, finish. Flower's two APIs
and the vectorized engine all use these calls. The rooms, in the order in which a round uses them:

================  =================================================================================================
``core``          the round from end to end: choose, collect, finish; the owners of a run's lasting state
``settings``      the options of a strategy, resolved once for every adapter
``option_checks`` options that contradict each other, or the selector
``run_length``    absolute round numbers, and the criteria that end a run early
``roll_call``     asks new connections for their identity, and sends the selector's questions before the choice
``registration``  enters new clients into the roster and informs the selector about them
``roster``        connections, client ids and the selector's rows; selector parameters by client id
``eligibility``   busy connections, cool-down, availability, quota for new clients, cap on participation
``round``         one round: its cohort, outcome and wall times, the selector's report and the history's records
``flights``       buffered rounds: the clients at work, and the arrivals of a round
``deadlines``     when a round ends at the latest: a fixed time, or the time that its clients usually take
``late``          updates that miss their round: how they are kept, and how they count (REFL)
``collecting``    reads all replies, replaces first times, finds stragglers, measures models, decides the averaging
``replies``       reads one reply: the update, the metrics and the latency
``reply_checks``  the columns and the structure that the replies of a round must have
``untrusted``     checks values from clients, and logs clients' faults
``models``        the models of a round as a list or a stack, and their faults; validation on the server's examples
``measuring``     measures the usable models, and the direction in which the global model moves (GPFL)
``history``       the record of a run, round by round and client by client
``records``       the history's rows, and a round as a line of JSON
``journal``       the file of finished rounds; recent rounds are in memory too
``state_dicts``   saving, loading and forgetting, common to the owners of lasting state
``fingerprints``  texts by which two runs are known to be the same
``checkpoints``   writes, reads and deletes checkpoints; decides whether a run begins, resumes or is refused
``storage``       atomic writes, and folders locked by one process
``csv_files``     the one reader of CSV files: histories of latencies, traces, devices
================  =================================================================================================
"""
