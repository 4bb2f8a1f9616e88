"""Communication topologies for decentralized learning."""
