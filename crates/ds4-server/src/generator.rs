//! Where answers come from: the engine, or in tests a script.

use std::time::Duration;

use ds4_engine::{EngineHandle, Event, Rejected, Request, Status};
use futures_util::stream::{self, BoxStream, StreamExt};

/// What a running request tells. Dropping it ends the request within one step.
pub type Events = BoxStream<'static, Event>;

/// The narrow part of the engine that the APIs use.
pub trait Generator: Send + Sync + 'static {
    /// Queues a request, or says at once why not. May take a moment: constraints are compiled here.
    fn submit(&self, request: Request) -> Result<Events, Rejected>;
    fn status(&self) -> Status;
    /// Takes no more requests; running ones may end within `limit`.
    fn drain(&self, limit: Duration);
}

impl Generator for EngineHandle {
    fn submit(&self, request: Request) -> Result<Events, Rejected> {
        let generation = EngineHandle::submit(self, request)?;
        let next = |mut g: ds4_engine::Generation| async move { g.next().await.map(|event| (event, g)) };
        Ok(stream::unfold(generation, next).boxed())
    }

    fn status(&self) -> Status {
        EngineHandle::status(self)
    }

    fn drain(&self, limit: Duration) {
        EngineHandle::drain(self, limit);
    }
}
