"""Ranks that continue without those that have died: separate connections per edge, and agreement on the members.

Loaded only with ``on_peer_loss="continue"``. ``mesh`` has a ``peer_connection`` to every other rank; messages travel
over it by ``edge_transport``, or are in memory that both ends share (``shared_payloads``), and may be mixed in later
(``late_messages``). ``agreement`` determines who trains; ``living_world`` has the collective operations, with
``patient_waits`` and a ``living_flag`` on which ranks agree while they train. A ``newcomer`` is admitted after a rank
has handed over its state (``handing_over``).
"""
