//! Who belongs to the cluster: whoever holds the shared secret file.
//!
//! The secret gives one Ed25519 key, `blake3::derive_key(CONTEXT, secret)` as its seed. Every node presents a
//! self-signed certificate of that key over TLS 1.3 and accepts only a peer that proves the same key. There are no
//! names, no authorities and no expiry; to expel a node, change the file on the others.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig};
use rustls::{SignatureScheme, version::TLS13};

use crate::error::ClusterError;

const CONTEXT: &str = "ds4 cluster 2026 node identity";
const SECRET_MIN_BYTES: usize = 16;
const SECRET_MAX_BYTES: usize = 4096;
/// PKCS #8 of an Ed25519 seed (RFC 8410, section 7), up to the seed.
const PKCS8_ED25519: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// How links are protected.
#[derive(Clone)]
pub enum Security {
    Shared(Identity),
    /// No encryption and no authentication: for measurements on a closed network.
    Insecure,
}

/// The cluster's key as TLS settings for both directions.
#[derive(Clone)]
pub struct Identity {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
}

impl Identity {
    /// From the text of a secret file; white space around it does not count.
    pub fn from_secret(secret: &[u8]) -> Result<Self, ClusterError> {
        let secret = secret.trim_ascii();
        if secret.len() < SECRET_MIN_BYTES {
            return Err(ClusterError::Key(format!(
                "the secret has {} bytes, at least {SECRET_MIN_BYTES} are needed; make one: head -c 32 /dev/urandom | base64",
                secret.len()
            )));
        }
        let pkcs8 = [&PKCS8_ED25519[..], &blake3::derive_key(CONTEXT, secret)].concat();
        Self::from_pkcs8(pkcs8).map_err(|e| ClusterError::Key(format!("no identity from the secret: {e}")))
    }

    fn from_pkcs8(pkcs8: Vec<u8>) -> Result<Self, Box<dyn std::error::Error>> {
        let key_der = PrivatePkcs8KeyDer::from(pkcs8);
        let key = rcgen::KeyPair::try_from(&key_der)?;
        let certificate = rcgen::CertificateParams::new(Vec::new())?.self_signed(&key)?;
        let provider = Arc::new(ring::default_provider());
        let pin = Arc::new(Pin {
            spki: spki(certificate.der())?,
            algorithms: provider.signature_verification_algorithms,
            provider: provider.clone(),
        });
        let chain = vec![certificate.der().clone()];
        let private = PrivateKeyDer::from(key_der);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(pin.clone())
            .with_single_cert(chain.clone(), private.clone_key())?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(pin)
            .with_client_auth_cert(chain, private)?;
        server.alpn_protocols = vec![b"h2".to_vec()];
        client.alpn_protocols = vec![b"h2".to_vec()];
        // A resumed session would skip the proof of the key.
        server.send_tls13_tickets = 0;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Identity { server: Arc::new(server), client: Arc::new(client) })
    }

    /// Reads the secret file that `--cluster-key` names.
    pub fn from_file(path: &Path) -> Result<Self, ClusterError> {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut text = Vec::new();
            std::fs::File::open(path)?.take(SECRET_MAX_BYTES as u64 + 1).read_to_end(&mut text)?;
            Ok(text)
        };
        let text = read().map_err(|e| ClusterError::Key(format!("{}: {e}", path.display())))?;
        if text.len() > SECRET_MAX_BYTES {
            return Err(ClusterError::Key(format!("{}: more than {SECRET_MAX_BYTES} bytes", path.display())));
        }
        Self::from_secret(&text).map_err(|e| match e {
            ClusterError::Key(why) => ClusterError::Key(format!("{}: {why}", path.display())),
            other => other,
        })
    }

    /// Reads `path`, or makes it with a fresh secret, readable by the user alone. Two processes that start at once
    /// agree: the file appears whole, and only the first one's stays.
    pub fn from_default_file(path: &Path) -> Result<Self, ClusterError> {
        if !path.exists() {
            create_secret(path).map_err(|e| ClusterError::Key(format!("{}: {e}", path.display())))?;
        }
        Self::from_file(path)
    }
}

/// `$XDG_CONFIG_HOME/ds4/cluster.key`, or the same under `~/.config`.
pub fn default_key_path() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".config")))?;
    Some(config.join("ds4").join("cluster.key"))
}

fn create_secret(path: &Path) -> std::io::Result<()> {
    use ::ring::rand::SecureRandom;
    let mut bytes = [0u8; 32];
    ::ring::rand::SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| std::io::Error::other("the system gives no random numbers"))?;
    let text: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&draft)?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    // A link does not replace a file that another process has put there meanwhile.
    let linked = std::fs::hard_link(&draft, path);
    std::fs::remove_file(&draft)?;
    match linked {
        Ok(()) => {
            tracing::warn!(path = %path.display(), "made a new cluster secret: copy this file to every node");
            Ok(())
        }
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

fn spki(certificate: &CertificateDer<'_>) -> Result<Vec<u8>, webpki::Error> {
    Ok(webpki::EndEntityCert::try_from(certificate)?.subject_public_key_info().to_vec())
}

/// Accepts the one public key of the cluster, in both directions.
#[derive(Debug)]
struct Pin {
    spki: Vec<u8>,
    algorithms: WebPkiSupportedAlgorithms,
    provider: Arc<CryptoProvider>,
}

impl Pin {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match spki(certificate) {
            Ok(found) if found == self.spki => Ok(()),
            _ => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, dss, &self.algorithms)
    }

    fn tls12<T>() -> Result<T, Error> {
        Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls13RequiredForQuic))
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Pin {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_secrets_are_refused_with_the_way_to_make_one() {
        let e = Identity::from_secret(b"  hunter2  ").err().expect("refused").to_string();
        assert!(e.contains("7 bytes") && e.contains("/dev/urandom"), "{e}");
    }

    #[test]
    fn the_default_file_is_made_once_and_is_private() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("ds4").join("cluster.key");
        Identity::from_default_file(&path).expect("made");
        let first = std::fs::read(&path).expect("there");
        Identity::from_default_file(&path).expect("read");
        create_secret(&path).expect("keeps what is there");
        assert_eq!(std::fs::read(&path).expect("there"), first);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read_dir(dir.path().join("ds4")).expect("folder").count(), 1, "no draft left");
    }
}
