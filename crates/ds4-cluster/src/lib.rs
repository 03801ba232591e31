//! Remote stages: wire protocol, coordinator, worker, heartbeat, replay.
