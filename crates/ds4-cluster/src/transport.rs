//! Sockets: TCP without delay, TLS by the shared secret, HTTP/2 with windows wide enough for activations.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server};

use crate::error::ClusterError;
use crate::security::Security;

/// Strangers that may be in a TLS handshake at once. rustls holds at most 64 KiB of an unfinished handshake message.
const HANDSHAKES_MAX: usize = 8;
/// A peer that has not proved its key by then is dropped.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Window of one HTTP/2 stream and of a connection, so that a step of prefill is in flight while the last one computes.
const WINDOW_BYTES: u32 = 16 << 20;
const FRAME_BYTES: u32 = 1 << 20;

/// A connected socket, encrypted or not.
pub enum Io {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::TlsStream<TcpStream>>),
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(s) => Pin::new(s).poll_read(cx, buf),
            Io::Tls(s) => Pin::new(s.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Io::Plain(s) => Pin::new(s).poll_write(cx, buf),
            Io::Tls(s) => Pin::new(s.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(s) => Pin::new(s).poll_flush(cx),
            Io::Tls(s) => Pin::new(s.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Io::Plain(s) => Pin::new(s).poll_shutdown(cx),
            Io::Tls(s) => Pin::new(s.as_mut()).poll_shutdown(cx),
        }
    }
}

impl Connected for Io {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        match self {
            Io::Plain(s) => s.peer_addr().ok(),
            Io::Tls(s) => s.get_ref().0.peer_addr().ok(),
        }
    }
}

pub async fn bind(address: SocketAddr) -> Result<TcpListener, ClusterError> {
    TcpListener::bind(address).await.map_err(|e| ClusterError::Listen { address, reason: e.to_string() })
}

/// Accepts for ever; yields only peers that have proved the key.
///
/// `Server::serve_with_incoming` leaves the sockets' delay setting alone, and with the system's default a round trip
/// of a step takes 40 ms: it is set here, on every socket.
pub fn incoming(listener: TcpListener, security: Security) -> ReceiverStream<io::Result<Io>> {
    let (ready, accepted) = mpsc::channel(HANDSHAKES_MAX);
    let strangers = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    tokio::spawn(async move {
        while let Ok(place) = strangers.clone().acquire_owned().await {
            let (socket, peer) = tokio::select! {
                () = ready.closed() => return,
                accepted = listener.accept() => match accepted {
                    Ok(pair) => pair,
                    Err(e) => {
                        // Out of file descriptors, mostly: the next accept would fail at once, too.
                        tracing::warn!(error = %e, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            let (security, ready) = (security.clone(), ready.clone());
            tokio::spawn(async move {
                let welcomed = tokio::time::timeout(HANDSHAKE_TIMEOUT, welcome(socket, security)).await;
                drop(place);
                match welcomed {
                    // The receiver is gone only when the server stops.
                    Ok(Ok(io)) => drop(ready.send(Ok(io)).await),
                    Ok(Err(e)) => tracing::warn!(%peer, reason = %refusal(&e), "refused a connection"),
                    Err(_) => {
                        tracing::warn!(%peer, "refused a connection: no key within {HANDSHAKE_TIMEOUT:?}")
                    }
                }
            });
        }
    });
    ReceiverStream::new(accepted)
}

async fn welcome(socket: TcpStream, security: Security) -> io::Result<Io> {
    socket.set_nodelay(true)?;
    Ok(match security {
        Security::Insecure => Io::Plain(socket),
        Security::Shared(identity) => {
            let tls = TlsAcceptor::from(identity.server).accept(socket).await?;
            Io::Tls(Box::new(tls.into()))
        }
    })
}

/// What a failed TLS handshake means to the user.
pub fn refusal(e: &io::Error) -> String {
    use rustls::{AlertDescription, CertificateError, Error};
    match e.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(
            Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
            | Error::AlertReceived(
                AlertDescription::AccessDenied
                | AlertDescription::BadCertificate
                | AlertDescription::CertificateUnknown
                | AlertDescription::DecryptError,
            ),
        ) => "the peer's --cluster-key is another one".into(),
        Some(Error::InvalidMessage(_)) => {
            "the peer does not speak TLS (--insecure-cluster on one side only?)".into()
        }
        Some(other) => format!("TLS: {other}"),
        None if e.kind() == io::ErrorKind::UnexpectedEof => "closed before it proved the key".into(),
        None => e.to_string(),
    }
}

/// A server builder with the settings of both sides of a link.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(8)
}

/// Connects once. Blocks for no longer than the handshake's time limit.
pub async fn connect(address: SocketAddr, security: &Security) -> Result<Channel, ClusterError> {
    let failed = |reason: String| ClusterError::Connect { address, reason };
    let io = tokio::time::timeout(HANDSHAKE_TIMEOUT, open(address, security.clone()))
        .await
        .map_err(|_| failed(format!("no answer within {HANDSHAKE_TIMEOUT:?}")))?
        .map_err(|e| failed(refusal(&e)))?;
    // One socket, one channel: when it breaks, the link is over, and its owner decides what happens next.
    let mut once = Some(io);
    let connector = tower::service_fn(move |_: http::Uri| {
        let io = once.take().ok_or_else(|| io::Error::other("the link is over"));
        async move { io.map(TokioIo::new) }
    });
    Endpoint::from_static("http://cluster")
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_max_header_list_size(16 << 10)
        .connect_with_connector(connector)
        .await
        .map_err(|e| failed(e.to_string()))
}

async fn open(address: SocketAddr, security: Security) -> io::Result<Io> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    Ok(match security {
        Security::Insecure => Io::Plain(socket),
        Security::Shared(identity) => {
            let name = ServerName::IpAddress(address.ip().into());
            let tls = TlsConnector::from(identity.client).connect(name, socket).await?;
            Io::Tls(Box::new(tls.into()))
        }
    })
}
