//! The listening socket: connections in, answers out, until it is told to end.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tower::ServiceExt;

use crate::doors::HEAD_MAX;
use crate::{App, ServerConfig, router};

/// A request's head must be there by then.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Between two looks at whether sampled turns are to be written.
const SAVE_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Error)]
pub enum ServerError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("{path}: {source}")]
    Trace { path: PathBuf, source: io::Error },
    #[error("no runtime for connections: {0}")]
    Runtime(io::Error),
    #[error("signals cannot be caught: {0}")]
    Signal(io::Error),
}

/// Where sampled turns outlive the program.
pub(crate) fn turns_file(config: &ServerConfig) -> Option<PathBuf> {
    config.state_dir.as_ref().map(|d| d.join("turns.jsonl"))
}

/// Listens and serves until the program is told to end; then lets running answers end. Blocks the thread.
pub fn serve(app: Arc<App>) -> Result<(), ServerError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)))
        .enable_all()
        .build()
        .map_err(ServerError::Runtime)?;
    runtime.block_on(async {
        let address = SocketAddr::new(app.config.host, app.config.port);
        let listening = |source| ServerError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(listening)?;
        let own = listener.local_addr().map_err(listening)?;
        tracing::info!("listening on http://{own}");
        if !own.ip().is_loopback() && app.keys.is_empty() {
            tracing::warn!(
                "RISK: anyone who reaches {own} can use this model, read its status and fill its queue: there is no \
                 key. Set --api-key, or listen on 127.0.0.1"
            );
        }
        let signal = end_signal().map_err(ServerError::Signal)?;
        serve_on(app, listener, signal).await;
        Ok(())
    })
}

/// Completes when the program is told to end.
fn end_signal() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Ok(async move {
        #[cfg(unix)]
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    })
}

/// Serves connections of `listener` until `end` completes, and then until running answers have ended or their time is
/// over.
pub async fn serve_on(app: Arc<App>, listener: TcpListener, end: impl Future<Output = ()>) {
    let service = router(app.clone());
    let places = Arc::new(Semaphore::new(app.config.connections));
    let graceful = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.max_buf_size(HEAD_MAX).timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
    let mut end = std::pin::pin!(end);
    let mut save = tokio::time::interval(SAVE_EVERY);
    loop {
        // A connection beyond the limit waits in the system's own queue.
        let accepted = async {
            let place = places.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            () = &mut end => break,
            _ = save.tick() => {
                save_turns(&app).await;
                continue;
            }
            accepted = accepted => accepted,
        };
        let (stream, place) = match (accepted, place) {
            (Ok((stream, _)), Ok(place)) => (stream, place),
            (Err(e), _) => {
                // Out of file handles, or a client that left at once: others may still come.
                tracing::warn!(error = %e, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            // The semaphore is never closed.
            (_, Err(_)) => break,
        };
        set_up(&stream);
        let service = TowerToHyperService::new(
            service.clone().map_request(|r: hyper::Request<hyper::body::Incoming>| r.map(Body::new)),
        );
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        let app = app.clone();
        tokio::spawn(async move {
            app.metrics.connection(true);
            // What a client does to its connection is its own matter.
            let ended: Result<(), hyper::Error> = connection.await;
            drop(ended);
            app.metrics.connection(false);
            drop(place);
        });
    }
    drop(listener);
    tracing::info!("ending: no new requests; running answers get {} s", app.config.drain.as_secs());
    app.generator.drain(app.config.drain);
    // A little more than the engine takes, so that its last words still reach the clients.
    if tokio::time::timeout(app.config.drain + Duration::from_secs(2), graceful.shutdown()).await.is_err() {
        tracing::warn!("some connections did not end in time");
    }
    save_turns(&app).await;
}

/// Small pieces go out at once.
fn set_up(stream: &TcpStream) {
    if let Err(e) = stream.set_nodelay(true) {
        tracing::debug!(error = %e, "a connection keeps its delay");
    }
}

async fn save_turns(app: &Arc<App>) {
    let Some(path) = turns_file(&app.config) else { return };
    let app = app.clone();
    let saved = tokio::task::spawn_blocking(move || (app.memory.save(&path), path)).await;
    if let Ok((Err(e), path)) = saved {
        tracing::warn!(path = %path.display(), error = %e, "sampled turns cannot be written");
    }
}
