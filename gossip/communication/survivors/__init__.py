"""Ranks that go on without those that have died: paths of their own per edge, and agreement on who is left.

Loaded with ``on_peer_loss="continue"`` alone. ``mesh`` has a ``peer_connection`` to every other rank; messages travel
over it by ``edge_transport``, or lie in memory that both ends share (``shared_payloads``), and may be mixed in later
(``late_messages``). ``agreement`` says who trains; ``living_world`` does what all of them do together, with
``patient_waits`` for each other and a ``living_flag`` for what they tell while they train. A ``newcomer`` is let in,
after somebody's state was handed over to it.
"""
