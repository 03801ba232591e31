//! The worker process: the protocol core on real sockets, and the stage on a thread of its own.

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ds4_engine::Survived;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::activation::Format;
use crate::convert;
use crate::core::worker::{Action, Event, Output, Worker};
use crate::core::{MESSAGE_BYTES_MAX, Timing};
use crate::error::ClusterError;
use crate::host::Host;
use crate::security::Security;
use crate::wire::cluster_client::ClusterClient;
use crate::wire::cluster_server::{Cluster, ClusterServer};
use crate::wire::{self, FromWorkerMessage};
use crate::{endpoint::Endpoint, transport};

/// Messages that wait for the network. The window of steps keeps them far below; more means that the peer reads no
/// longer.
pub(crate) const OUTBOX: usize = 8192;
const INBOX: usize = 64;

pub struct Options {
    pub coordinator: Endpoint,
    /// Where other workers of the route may connect.
    pub listen: Option<Endpoint>,
    pub security: Security,
    pub timing: Timing,
    pub hello: wire::Hello,
}

/// Ends a running worker.
#[derive(Clone)]
pub struct Stop(mpsc::Sender<String>);

impl Stop {
    /// The handle, and what [`run`] takes.
    pub fn new() -> (Stop, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel(1);
        (Stop(sender), receiver)
    }

    /// A second call changes nothing: the worker is ending already.
    pub fn stop(&self, reason: &str) {
        drop(self.0.try_send(reason.to_string()));
    }
}

/// Makes the stage's host on a thread of its own, and serves until told to stop or refused for good. `Ok` holds the reason why it ended as asked.
pub fn run<H: Host>(
    options: Options,
    make: impl FnOnce() -> H + Send + 'static,
    stop: mpsc::Receiver<String>,
) -> Result<String, ClusterError> {
    let runtime = crate::runtime()?;
    let (jobs, queue) = blocking::sync_channel(2);
    let (events, inbox) = mpsc::channel(INBOX);
    let embeds = options.hello.layers.is_some_and(|l| l.first == 0);
    let make = move || Stage { host: make(), embeds, format: Format::Bits32, width: 0 };
    let stage = spawn_stage(make, queue, events.clone())?;
    let ended = runtime.block_on(serve(options, jobs, events, inbox, stop));
    runtime.shutdown_timeout(Duration::from_millis(200));
    // A stage in the middle of a long step would hold up the exit; the process ends without it.
    if stage.is_finished() && stage.join().is_err() {
        tracing::error!("the stage's thread panicked");
    }
    ended
}

enum Job {
    Load(wire::Welcome),
    Restart(u64),
    Run(wire::Step, Vec<Bytes>),
}

/// An event and the connection that it belongs to; 0: to none.
type Tagged = (u64, Event);

/// The stage on its thread, and how its activations travel.
struct Stage<H> {
    host: H,
    embeds: bool,
    format: Format,
    width: usize,
}

impl<H: Host> Stage<H> {
    fn work(&mut self, job: Job) -> Event {
        match job {
            Job::Load(welcome) => {
                self.format = Format::from_bits(welcome.activation_bits).unwrap_or(Format::Bits32);
                self.width = welcome.width as usize;
                Event::Loaded(self.host.load(&convert::ask(&welcome)).map_err(|e| convert::fault_to_wire(&e)))
            }
            Job::Restart(epoch) => {
                let result = self.host.restart().map(|s| s == Survived::State);
                Event::Restarted { epoch, result: result.map_err(|e| convert::fault_to_wire(&e)) }
            }
            Job::Run(step, pieces) => {
                let started = Instant::now();
                let result = self.run(&step, &pieces);
                Event::Ran { epoch: step.epoch, step: step.number, result, compute: started.elapsed() }
            }
        }
    }

    fn run(&mut self, message: &wire::Step, pieces: &[Bytes]) -> Result<Output, Box<wire::Fault>> {
        let unclear = |e: ClusterError| convert::protocol_fault(&e);
        let step = convert::step_from_wire(message).map_err(unclear)?;
        let rows = step.batch.len();
        let hidden = match self.embeds || rows == 0 {
            true => None,
            false => Some(convert::hidden_from_wire(pieces, self.format, rows, self.width).map_err(unclear)?),
        };
        let output = self.host.run(&step, hidden.as_deref()).map_err(|e| convert::fault_to_wire(&e))?;
        Ok(Output {
            hidden: self.format.encode(output.hidden, self.width),
            rows: output.rows.into_iter().map(convert::row_to_wire).collect(),
            reads: output.reads.into_iter().map(Bytes::from).collect(),
        })
    }
}

fn spawn_stage<H: Host>(
    make: impl FnOnce() -> Stage<H> + Send + 'static,
    queue: blocking::Receiver<Job>,
    events: mpsc::Sender<Tagged>,
) -> Result<std::thread::JoinHandle<()>, ClusterError> {
    let run = move || {
        let mut stage = make();
        while let Ok(job) = queue.recv() {
            let event =
                std::panic::catch_unwind(AssertUnwindSafe(|| stage.work(job))).unwrap_or_else(|cause| {
                    Event::Exit { reason: format!("the stage panicked: {}", panic_text(cause.as_ref())) }
                });
            // Closed: the worker has ended.
            if events.blocking_send((0, event)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("stage".into())
        .spawn(run)
        .map_err(|e| ClusterError::Usage(format!("cannot start a thread: {e}")))
}

fn panic_text(cause: &(dyn std::any::Any + Send)) -> String {
    let text = cause.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

async fn serve(
    mut options: Options,
    jobs: blocking::SyncSender<Job>,
    events: mpsc::Sender<Tagged>,
    mut inbox: mpsc::Receiver<Tagged>,
    mut stop: mpsc::Receiver<String>,
) -> Result<String, ClusterError> {
    if let Some(endpoint) = &options.listen {
        let address = endpoint.resolve().await?;
        let listener = transport::bind(address).await?;
        let bound =
            listener.local_addr().map_err(|e| ClusterError::Listen { address, reason: e.to_string() })?;
        options.hello.listen = bound.to_string();
        let service = ClusterServer::new(FeedService { events: events.clone() })
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let incoming = transport::incoming(listener, options.security.clone());
        tokio::spawn(async move {
            if let Err(e) = transport::server().add_service(service).serve_with_incoming(incoming).await {
                tracing::error!(error = %e, "no longer listening for other workers");
            }
        });
    }
    let start = Instant::now();
    let mut core = Worker::new(options.timing, options.hello.clone());
    let mut driver = Driver { options, jobs, events, connection: 0, outbox: None, feed: None };
    let mut ticks =
        tokio::time::interval((driver.options.timing.heartbeat / 4).max(Duration::from_millis(10)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut terminated = Terminated::new()?;
    loop {
        let event = tokio::select! {
            Some((connection, event)) = inbox.recv() => {
                if connection != 0 && connection != driver.connection {
                    continue;
                }
                event
            }
            _ = ticks.tick() => Event::Tick,
            Some(reason) = stop.recv() => Event::Exit { reason },
            reason = terminated.signal() => Event::Exit { reason: reason.into() },
        };
        for action in core.handle(start.elapsed(), event) {
            if let Some(ended) = driver.act(action) {
                // Let the farewell reach the wire.
                tokio::time::sleep(Duration::from_millis(100)).await;
                return ended;
            }
        }
    }
}

struct Driver {
    options: Options,
    jobs: blocking::SyncSender<Job>,
    events: mpsc::Sender<Tagged>,
    /// Numbers connections to the coordinator, so that the last words of an old one are not taken for the new one's.
    connection: u64,
    outbox: Option<mpsc::Sender<wire::FromWorker>>,
    feed: Option<mpsc::Sender<wire::Activations>>,
}

impl Driver {
    fn act(&mut self, action: Action) -> Option<Result<String, ClusterError>> {
        match action {
            Action::Connect => self.connect(),
            Action::Send(message) => self.send(message),
            Action::Close => self.outbox = None,
            Action::Load(welcome) => self.job(Job::Load(welcome)),
            Action::Restart { epoch } => self.job(Job::Restart(epoch)),
            Action::Run { step, rows } => self.job(Job::Run(step, rows)),
            Action::Next { address } => self.next(address),
            Action::Feed(piece) => {
                let sent = self.feed.as_ref().is_some_and(|f| f.try_send(piece).is_ok());
                if !sent {
                    self.feed = None;
                    self.tell(0, Event::FeedLost { reason: "it does not take what is sent".into() });
                }
            }
            Action::Log { problem: true, text } => tracing::warn!("{text}"),
            Action::Log { problem: false, text } => tracing::info!("{text}"),
            Action::Stop { refused: false, reason } => return Some(Ok(reason)),
            Action::Stop { refused: true, reason } => {
                let peer = self.options.coordinator.to_string();
                return Some(Err(ClusterError::Refused { peer, reason }));
            }
        }
        None
    }

    /// An event that the driver itself raises, from outside the loop that would wait for it.
    fn tell(&self, connection: u64, event: Event) {
        let events = self.events.clone();
        tokio::spawn(async move { drop(events.send((connection, event)).await) });
    }

    fn job(&mut self, job: Job) {
        // The core hands out one job at a time, so the queue of two never fills; a stage that is gone has said why.
        if self.jobs.try_send(job).is_err() {
            self.tell(0, Event::Exit { reason: "the stage takes no more work".into() });
        }
    }

    fn send(&mut self, message: FromWorkerMessage) {
        let Some(outbox) = &self.outbox else { return };
        if outbox.try_send(wire::FromWorker { message: Some(message) }).is_err() {
            self.outbox = None;
            self.tell(self.connection, Event::Closed { reason: "it no longer takes what is sent".into() });
        }
    }

    fn connect(&mut self) {
        self.connection += 1;
        let (outbox, outgoing) = mpsc::channel(OUTBOX);
        self.outbox = Some(outbox);
        let connection = self.connection;
        let (coordinator, security) = (self.options.coordinator.clone(), self.options.security.clone());
        let events = self.events.clone();
        tokio::spawn(async move {
            let told = events.clone();
            let reason = match talk(coordinator, security, outgoing, connection, events).await {
                Ok(()) => "the coordinator closed the connection".to_string(),
                Err(e) => e.to_string(),
            };
            drop(told.send((connection, Event::Closed { reason })).await);
        });
    }

    fn next(&mut self, address: String) {
        let (feed, outgoing) = mpsc::channel(OUTBOX);
        self.feed = Some(feed);
        let (security, events) = (self.options.security.clone(), self.events.clone());
        tokio::spawn(async move {
            if let Err(e) = hand_on(&address, security, outgoing).await {
                drop(events.send((0, Event::FeedLost { reason: e.to_string() })).await);
            }
        });
    }
}

/// One connection to the coordinator, until it ends.
async fn talk(
    coordinator: Endpoint,
    security: Security,
    outgoing: mpsc::Receiver<wire::FromWorker>,
    connection: u64,
    events: mpsc::Sender<Tagged>,
) -> Result<(), ClusterError> {
    let address = coordinator.resolve().await?;
    let mut client = client(address, &security).await?;
    if events.send((connection, Event::Connected)).await.is_err() {
        return Ok(());
    }
    let ended = |status: Status| ClusterError::Protocol(describe_status(&status));
    let mut incoming = client.join(ReceiverStream::new(outgoing)).await.map_err(ended)?.into_inner();
    while let Some(message) = incoming.message().await.map_err(ended)? {
        let Some(message) = message.message else {
            return Err(ClusterError::Protocol("a message that this version does not know".into()));
        };
        if events.send((connection, Event::Message(message))).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Activations to the next node, until the epoch's sender is dropped.
async fn hand_on(
    address: &str,
    security: Security,
    outgoing: mpsc::Receiver<wire::Activations>,
) -> Result<(), ClusterError> {
    let address: SocketAddr =
        address.parse().map_err(|_| ClusterError::Protocol(format!("{address:?} is no address")))?;
    let mut client = client(address, &security).await?;
    client
        .feed(ReceiverStream::new(outgoing))
        .await
        .map_err(|s| ClusterError::Protocol(describe_status(&s)))?;
    Ok(())
}

async fn client(
    address: SocketAddr,
    security: &Security,
) -> Result<ClusterClient<tonic::transport::Channel>, ClusterError> {
    Ok(ClusterClient::new(transport::connect(address, security).await?)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX))
}

pub(crate) fn describe_status(status: &Status) -> String {
    let text = status.message();
    if text.is_empty() { format!("the connection broke ({})", status.code()) } else { text.to_string() }
}

/// Takes activations from the previous node of the route.
struct FeedService {
    events: mpsc::Sender<Tagged>,
}

#[tonic::async_trait]
impl Cluster for FeedService {
    type JoinStream = ReceiverStream<Result<wire::ToWorker, Status>>;

    async fn join(
        &self,
        _: Request<Streaming<wire::FromWorker>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        Err(Status::unimplemented("this is a worker: --coordinator names another address"))
    }

    async fn feed(
        &self,
        request: Request<Streaming<wire::Activations>>,
    ) -> Result<Response<wire::FeedEnd>, Status> {
        let mut incoming = request.into_inner();
        while let Some(piece) = incoming.message().await? {
            if self.events.send((0, Event::Fed(piece))).await.is_err() {
                break;
            }
        }
        Ok(Response::new(wire::FeedEnd {}))
    }
}

/// The system asks the process to end.
struct Terminated {
    #[cfg(unix)]
    signals: [tokio::signal::unix::Signal; 2],
}

impl Terminated {
    fn new() -> Result<Self, ClusterError> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let failed = |e: std::io::Error| ClusterError::Usage(format!("cannot listen for signals: {e}"));
            let terminate = signal(SignalKind::terminate()).map_err(failed)?;
            let interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
            Ok(Terminated { signals: [terminate, interrupt] })
        }
        #[cfg(not(unix))]
        Ok(Terminated {})
    }

    async fn signal(&mut self) -> &'static str {
        #[cfg(unix)]
        {
            let [terminate, interrupt] = &mut self.signals;
            tokio::select! {
                _ = terminate.recv() => "it was asked to (SIGTERM)",
                _ = interrupt.recv() => "it was interrupted (SIGINT)",
            }
        }
        #[cfg(not(unix))]
        {
            drop(tokio::signal::ctrl_c().await);
            "it was interrupted"
        }
    }
}
