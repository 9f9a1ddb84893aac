//! TLS 1.3 (RFC 8446) for everything that travels over TCP, with a certificate on both sides.
//!
//! The initiator checks that the certificate is for the name or address that it dialled. The
//! responder checks that the initiator's certificate is from the job's authority. Resumption and
//! early data are off, so every connection does the full handshake.

use std::fmt::Display;
use std::io;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::net::RecvFlags;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

use super::connection::Connection;
use super::deadline_stream::{DeadlineStream, GoOn};
use super::session::{Session, refusal};
use super::socket::is_later;
use crate::config::TlsFiles;
use gradring_proto::error::{Error, Result, Text, Unusable};
use gradring_proto::wire::handshake;

/// Names of the files in messages: argument and variable, because the user gave one of them.
const CA: &str = "tls.ca (GRADRING_TLS_CA)";
const CERTIFICATE: &str = "tls.cert (GRADRING_TLS_CERT)";
const KEY: &str = "tls.key (GRADRING_TLS_KEY)";

/// Configurations of TLS for both roles of a rank.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// `Config` with the name of a file that cannot be read or used.
    pub(crate) fn load(files: &TlsFiles) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for certificate in certificates(CA, &files.ca)? {
            let unusable = |error| unusable(CA, &files.ca, &error);
            roots.add(certificate).map_err(unusable)?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(CERTIFICATE, &files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|error| unreadable(KEY, &files.key, &error))?;

        let of_own = |error| unusable(CERTIFICATE, &files.certificate, &error);
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(of_own)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(of_own)?;
        client.resumption = Resumption::disabled();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| unusable(CA, &files.ca, &error))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(of_own)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(of_own)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        // A ticket would stay unread on a connection that carries payload only the other way.
        server.send_tls13_tickets = 0;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }
}

/// Makes the initiator's side of a connection to `address`, a `host:port`; plain without `tls`.
/// Polls `go_on` during waits.
///
/// # Errors
/// `Authentication` for a certificate that one side does not accept; `Config` when the responder
/// speaks no TLS; `Rendezvous` when the connection breaks.
pub(crate) fn connect(
    tcp: TcpStream,
    tls: Option<&Tls>,
    address: &str,
    deadline: Instant,
    go_on: GoOn<'_>,
) -> Result<Connection> {
    let mut connection = Connection::new(tcp).map_err(|error| broken(&error))?;
    if let Some(tls) = tls {
        let host = host_of(address);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| Unusable::NotAName { host: host.into() })?;
        let client = ClientConnection::new(Arc::clone(&tls.client), name)
            .map_err(|error| refusal(&error))?;
        let mut stream = DeadlineStream::cancellable(&mut connection, deadline, go_on);
        let session = shake_hands(&mut stream, client.into()).map_err(|error| broken(&error))?;
        connection.enter(session);
    }
    Ok(connection)
}

/// Makes the responder's side of a connection; plain without `tls`.
///
/// # Errors
/// As for `connect`; `Config` when only one side speaks TLS, which is also sent to the initiator.
pub(crate) fn accept(tcp: TcpStream, tls: Option<&Tls>, deadline: Instant) -> Result<Connection> {
    let speaks_tls = begins_with_tls(&tcp, deadline).map_err(|error| broken(&error))?;
    let mut connection = Connection::new(tcp).map_err(|error| broken(&error))?;
    let mut stream = DeadlineStream::new(&mut connection, deadline);
    let problem = match (tls, speaks_tls) {
        (None, false) => return Ok(connection),
        (Some(tls), true) => {
            let server =
                ServerConnection::new(Arc::clone(&tls.server)).map_err(|error| refusal(&error))?;
            return match shake_hands(&mut stream, server.into()) {
                Ok(session) => {
                    connection.enter(session);
                    Ok(connection)
                }
                Err(error) => {
                    stream.dismiss();
                    Err(broken(&error))
                }
            };
        }
        (Some(_), false) => Unusable::InitiatorWithoutTls,
        (None, true) => Unusable::ResponderWithoutTls,
    };
    let error = Error::from(problem);
    handshake::refuse(&mut stream, &error);
    stream.dismiss();
    Err(error)
}

/// Waits for the first bytes of a new connection. Returns `true` if they begin a handshake of TLS.
fn begins_with_tls(tcp: &TcpStream, deadline: Instant) -> io::Result<bool> {
    /// Start of a handshake record, equal in TLS 1.0 and all later versions. The length of a plain
    /// greeting never looks like that.
    const BEGINNING: [u8; 2] = [22, 3];
    let mut bytes = [0; BEGINNING.len() + 1];
    let count = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        tcp.set_read_timeout(Some(left))?;
        match rustix::net::recv(tcp, &mut bytes[..], RecvFlags::PEEK | RecvFlags::WAITALL) {
            Err(error) if is_later(error.kind()) => {}
            received => break received?.0,
        }
    };
    if count < bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes[..2] == BEGINNING && bytes[2] > 0)
}

/// Completes the handshake of TLS, in which both sides present their certificates.
pub(super) fn shake_hands(
    stream: &mut DeadlineStream<'_>,
    mut tls: rustls::Connection,
) -> io::Result<Session> {
    while tls.is_handshaking() || tls.wants_write() {
        tls.complete_io(stream)?;
    }
    Ok(Session::new(tls))
}

fn broken(error: &io::Error) -> Error {
    let inner = error.get_ref();
    match inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => refusal(error),
        None => handshake::broken(error),
    }
}

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |error| unreadable(setting, path, &error);
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(unreadable)?;
    if found.is_empty() {
        return Err(unreadable(pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable(setting: &str, path: &Path, error: &pem::Error) -> Error {
    Unusable::NotPem {
        setting: setting.into(),
        path: Text::of(path.display()),
        error: Text::of(error),
    }
    .into()
}

fn unusable(setting: &str, path: &Path, error: &impl Display) -> Error {
    Unusable::Certificate {
        setting: setting.into(),
        path: Text::of(path.display()),
        error: Text::of(error),
    }
    .into()
}

/// Returns the host in `host:port`, without the brackets of an IPv6 address.
pub fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}
