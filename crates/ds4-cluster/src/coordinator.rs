//! The coordinator on real sockets, and what the engine sees of it: a route that is whole or not, and spans of it that
//! take steps.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::core::coordinator::{Action, Config, Coordinator, Event, Failure, Lost, NodeStatus, Up, Why};
use crate::core::{Link, MESSAGE_BYTES_MAX};
use crate::endpoint::Endpoint;
use crate::error::ClusterError;
use crate::security::Security;
use crate::transport;
use crate::wire::cluster_server::{Cluster as Service, ClusterServer};
use crate::wire::{self, ToWorkerMessage};
use crate::worker::{OUTBOX, describe_status};

const INBOX: usize = 256;

pub struct Options {
    pub listen: Endpoint,
    pub security: Security,
    pub core: Config,
}

/// A listening coordinator. It stops when the last handle is dropped.
#[derive(Clone)]
pub struct Cluster {
    running: Arc<Running>,
}

struct Running {
    inbox: mpsc::Sender<Event>,
    shared: Arc<Shared>,
    address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What a span gave for a step: activations in pieces, and one report per node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    pub hidden: Vec<Bytes>,
    pub reports: Vec<wire::StepDone>,
}

struct Shared {
    start: Instant,
    view: Mutex<View>,
    changed: Condvar,
}

/// What the engine's thread may look at.
struct View {
    up: Option<Up>,
    lost: Lost,
    spans: Vec<SpanView>,
    nodes: Vec<NodeStatus>,
}

#[derive(Default)]
struct SpanView {
    hidden: VecDeque<(u64, Bytes)>,
    ended: VecDeque<Result<Finished, Failure>>,
}

impl Shared {
    fn view(&self) -> MutexGuard<'_, View> {
        // The view is replaced whole under the lock; a thread that panicked has left it as it was.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` gives something or `until` has come.
    fn wait<T>(&self, until: Instant, mut ready: impl FnMut(&mut View) -> Option<T>) -> Option<T> {
        let mut view = self.view();
        loop {
            if let Some(value) = ready(&mut view) {
                return Some(value);
            }
            let left = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())?;
            view = self.changed.wait_timeout(view, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Cluster {
    /// Listens, and returns at once: workers come and go.
    pub fn start(options: Options) -> Result<Self, ClusterError> {
        let runtime = crate::runtime()?;
        let listener = runtime.block_on(async {
            let address = options.listen.resolve().await?;
            transport::bind(address).await
        })?;
        let address = listener.local_addr().map_err(|e| ClusterError::Usage(e.to_string()))?;
        if matches!(options.security, Security::Insecure) {
            tracing::warn!(
                "--insecure-cluster: {address} takes workers WITHOUT key and WITHOUT encryption; anybody who reaches it can read and change what is computed"
            );
        }
        let core = Coordinator::new(options.core);
        let shared = Arc::new(Shared {
            start: Instant::now(),
            view: Mutex::new(View {
                up: None,
                lost: core.lost().unwrap_or(Lost {
                    why: Why::Restart("the cluster starts".into()),
                    since: Duration::ZERO,
                }),
                spans: Vec::new(),
                nodes: Vec::new(),
            }),
            changed: Condvar::new(),
        });
        let (inbox, events) = mpsc::channel(INBOX);
        let (links, new_links) = mpsc::channel(INBOX);
        let service = JoinService { inbox: inbox.clone(), links, next: AtomicU64::new(1) };
        let service = ClusterServer::new(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let actor = Actor { core, shared: shared.clone(), links: HashMap::new(), new_links };
        runtime.spawn(actor.run(events));
        runtime.spawn(async move {
            let incoming = transport::incoming(listener, options.security);
            if let Err(e) = transport::server().add_service(service).serve_with_incoming(incoming).await {
                tracing::error!(error = %e, "no longer listening for workers");
            }
        });
        Ok(Cluster { running: Arc::new(Running { inbox, shared, address, runtime: Some(runtime) }) })
    }

    pub fn address(&self) -> SocketAddr {
        self.running.address
    }

    /// Why no steps run now; `None` while the route is whole.
    pub fn lost(&self) -> Option<Lost> {
        let view = self.running.shared.view();
        view.up.is_none().then(|| view.lost.clone())
    }

    /// How long ago `lost` happened.
    pub fn age(&self, lost: &Lost) -> Duration {
        self.running.shared.start.elapsed().saturating_sub(lost.since)
    }

    /// Every node that is connected.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        self.running.shared.view().nodes.clone()
    }

    /// Waits for a whole route of an epoch after `after`.
    pub fn wait(&self, after: u64, until: Instant) -> Result<Up, Lost> {
        let up = self.running.shared.wait(until, |view| view.up.clone().filter(|up| up.epoch > after));
        up.ok_or_else(|| self.running.shared.view().lost.clone())
    }

    /// Hands a step to a span: `rows` are the activations that it starts from. What comes of it is told by
    /// [`Cluster::next`], in order.
    pub fn submit(&self, span: usize, step: wire::Step, rows: Bytes) {
        self.send(Event::Submit { span, step, rows });
    }

    /// The end of the span's next step under `epoch`. `None`: not by `until`.
    pub fn next(&self, span: usize, epoch: u64, until: Instant) -> Option<Result<Finished, Failure>> {
        self.running.shared.wait(until, |view| {
            let ended = view.spans.get_mut(span).and_then(|s| s.ended.pop_front());
            ended.or_else(|| {
                let gone = view.up.as_ref().is_none_or(|up| up.epoch != epoch);
                gone.then(|| Err(Failure::Lost(view.lost.clone())))
            })
        })
    }

    /// Begins a new epoch over the same nodes: the engine cannot go on from where they are.
    pub fn restart(&self, epoch: u64, reason: &str) {
        self.send(Event::Restart { epoch, reason: reason.to_string() });
    }

    fn send(&self, event: Event) {
        // Closed only while the process ends.
        if self.running.inbox.blocking_send(event).is_err() {
            tracing::error!("the cluster's task has ended");
        }
    }
}

/// Runs the core: the only one who touches it.
struct Actor {
    core: Coordinator,
    shared: Arc<Shared>,
    links: HashMap<Link, Connection>,
    new_links: mpsc::Receiver<(Link, Connection)>,
}

struct Connection {
    outbox: mpsc::Sender<Result<wire::ToWorker, Status>>,
    reader: JoinHandle<()>,
}

impl Actor {
    async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        let mut ticks = tokio::time::interval(Duration::from_millis(50));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                // A link is told of before its first event.
                biased;
                Some((link, connection)) = self.new_links.recv() => {
                    self.links.insert(link, connection);
                    continue;
                }
                event = events.recv() => match event {
                    Some(event) => event,
                    None => return,
                },
                _ = ticks.tick() => Event::Tick,
            };
            let tick = matches!(event, Event::Tick);
            let now = self.shared.start.elapsed();
            for action in self.core.handle(now, event) {
                self.act(action);
            }
            if tick {
                let nodes = self.core.status(now);
                self.shared.view().nodes = nodes;
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Send { link, message } => self.send(link, message),
            Action::Close { link } => {
                if let Some(connection) = self.links.remove(&link) {
                    connection.reader.abort();
                }
            }
            Action::RouteUp(up) => {
                let mut view = self.shared.view();
                view.spans = up.spans.iter().map(|_| SpanView::default()).collect();
                view.up = Some(up);
                self.shared.changed.notify_all();
            }
            Action::RouteDown(lost) => {
                let mut view = self.shared.view();
                view.up = None;
                view.lost = lost;
                self.shared.changed.notify_all();
            }
            Action::Rows { span, piece } => {
                let mut view = self.shared.view();
                if let Some(span) = view.spans.get_mut(span) {
                    span.hidden.push_back((piece.step, piece.data));
                }
            }
            Action::Done { span, reports } => {
                let mut view = self.shared.view();
                if let Some(span) = view.spans.get_mut(span) {
                    let step = reports.first().map_or(0, |r| r.step);
                    let mut hidden = Vec::new();
                    while span.hidden.front().is_some_and(|(of, _)| *of <= step) {
                        hidden.extend(span.hidden.pop_front().map(|(_, data)| data));
                    }
                    span.ended.push_back(Ok(Finished { hidden, reports }));
                    self.shared.changed.notify_all();
                }
            }
            Action::Failed { span, failure } => {
                let mut view = self.shared.view();
                if let Some(span) = view.spans.get_mut(span) {
                    span.ended.push_back(Err(failure));
                    self.shared.changed.notify_all();
                }
            }
            Action::Log { problem, text } => {
                if problem {
                    tracing::warn!("{text}");
                } else {
                    tracing::info!("{text}");
                }
                if let Some(lost) = self.core.lost() {
                    self.shared.view().lost = lost;
                }
            }
        }
    }

    fn send(&mut self, link: Link, message: ToWorkerMessage) {
        let Some(connection) = self.links.get(&link) else { return };
        if connection.outbox.try_send(Ok(wire::ToWorker { message: Some(message) })).is_err() {
            // It reads no longer: its silence will be noticed, and its reader reports the end.
            if let Some(connection) = self.links.remove(&link) {
                connection.reader.abort();
            }
        }
    }
}

struct JoinService {
    inbox: mpsc::Sender<Event>,
    links: mpsc::Sender<(Link, Connection)>,
    next: AtomicU64,
}

#[tonic::async_trait]
impl Service for JoinService {
    type JoinStream = ReceiverStream<Result<wire::ToWorker, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<wire::FromWorker>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let address = request.extensions().get::<Option<SocketAddr>>().copied().flatten();
        let peer = address.map_or_else(|| "unknown address".to_string(), |a| a.to_string());
        let link = self.next.fetch_add(1, Ordering::Relaxed);
        let (outbox, outgoing) = mpsc::channel(OUTBOX);
        let ending = || Status::unavailable("the coordinator is ending");
        // The reader waits for the link to be known, so that no event comes before it.
        let (known, wait) = tokio::sync::oneshot::channel();
        let inbox = self.inbox.clone();
        let reader = tokio::spawn(async move {
            if wait.await.is_ok() {
                read(link, request.into_inner(), inbox).await;
            }
        });
        self.links.send((link, Connection { outbox, reader })).await.map_err(|_| ending())?;
        self.inbox.send(Event::Opened { link, peer }).await.map_err(|_| ending())?;
        // Err: the reader was aborted already, by a coordinator that has no place.
        if known.send(()).is_err() {
            tracing::debug!(link, "closed before it was read");
        }
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }

    async fn feed(
        &self,
        _: Request<Streaming<wire::Activations>>,
    ) -> Result<Response<wire::FeedEnd>, Status> {
        Err(Status::unimplemented("activations for the coordinator's own layers go over Join"))
    }
}

async fn read(link: Link, mut incoming: Streaming<wire::FromWorker>, inbox: mpsc::Sender<Event>) {
    let reason = loop {
        match incoming.message().await {
            Ok(Some(wire::FromWorker { message: Some(message) })) => {
                if inbox.send(Event::Message { link, message }).await.is_err() {
                    return;
                }
            }
            Ok(Some(_)) => break "it sent a message that this version does not know".to_string(),
            Ok(None) => break "it closed the connection".to_string(),
            Err(status) => break describe_status(&status),
        }
    };
    // Closed only while the process ends.
    drop(inbox.send(Event::Closed { link, reason }).await);
}
