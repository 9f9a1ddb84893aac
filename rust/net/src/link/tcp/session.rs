//! TLS over a non-blocking socket, which may take a part of any record.
//!
//! Bytes count as sent when the peer will get them without further calls, and as unsent when
//! another connection could take them instead. Encrypted bytes are neither until the socket has
//! taken all of their ciphertext. Meanwhile all but the last of them count as sent. So the bytes
//! belong to this connection, and the caller returns for the last one. No ciphertext is left behind
//! when a collective ends.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};

use rustls::CertificateError;

use super::socket::is_later;
use gradring_proto::error::{Breach, Error, NotTrusted, Text, Unusable};

/// Bytes of plaintext encrypted at a time: sixteen records, which stay in cache until they are
/// sent.
const SEND_BYTES: usize = 256 << 10;
/// Bytes of ciphertext received at a time.
const RECEIVE_BYTES: usize = 128 << 10;

/// TLS of a connection after the handshake.
pub(super) struct Session {
    connection: rustls::Connection,
    /// Encrypted bytes of plaintext that were not reported as sent, at most one. Their ciphertext
    /// has not been sent in full.
    withheld: usize,
    inbox: Box<[u8]>,
    /// Range of the inbox that has not been decrypted.
    received: std::ops::Range<usize>,
    /// Decrypted bytes that wait inside the connection.
    decrypted: usize,
}

impl Session {
    pub(super) fn new(mut connection: rustls::Connection) -> Self {
        connection.set_buffer_limit(None);
        // Payload may have arrived together with the last message of the handshake.
        let state = connection.process_new_packets();
        Self {
            decrypted: state.map_or(0, |state| state.plaintext_bytes_to_read()),
            connection,
            withheld: 0,
            inbox: vec![0; RECEIVE_BYTES].into(),
            received: 0..0,
        }
    }

    pub(super) fn has_buffered(&self) -> bool {
        self.decrypted > 0 || !self.received.is_empty()
    }

    /// Same as `Connection::send`.
    pub(super) fn send(
        &mut self,
        socket: &mut impl Write,
        parts: &[IoSlice<'_>],
    ) -> io::Result<usize> {
        if self.withheld > 0 {
            self.flush(socket)?;
            return Ok(std::mem::take(&mut self.withheld));
        }
        let mut encrypted = 0;
        for part in parts {
            let length = part.len().min(SEND_BYTES - encrypted);
            encrypted += self.connection.writer().write(&part[..length])?;
        }
        match self.flush(socket) {
            Err(error) if is_later(error.kind()) && encrypted > 0 => {
                self.withheld = 1;
                match encrypted {
                    1 => Err(error),
                    _ => Ok(encrypted - 1),
                }
            }
            flushed => flushed.map(|()| encrypted),
        }
    }

    fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(socket)?;
        }
        Ok(())
    }

    /// Same as `Connection::receive`.
    pub(super) fn receive(
        &mut self,
        socket: &mut impl Read,
        parts: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let wanted: usize = parts.iter().map(|part| part.len()).sum();
        let mut filled = 0;
        loop {
            filled += self.take_decrypted(parts, filled)?;
            if filled == wanted {
                return Ok(filled);
            }
            if self.received.is_empty() {
                if filled > 0 {
                    return Ok(filled);
                }
                match socket.read(&mut self.inbox)? {
                    0 => return Ok(0),
                    count => self.received = 0..count,
                }
            }
            let mut ciphertext = &self.inbox[self.received.clone()];
            self.received.start += self.connection.read_tls(&mut ciphertext)?;
            let state = self
                .connection
                .process_new_packets()
                .map_err(|error| io::Error::new(ErrorKind::InvalidData, refusal(&error)))?;
            self.decrypted = state.plaintext_bytes_to_read();
            if state.peer_has_closed() && self.decrypted == 0 {
                return Ok(filled);
            }
        }
    }

    /// Moves decrypted bytes into `parts`, behind the first `filled` bytes.
    fn take_decrypted(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        mut filled: usize,
    ) -> io::Result<usize> {
        let mut taken = 0;
        for part in parts {
            let skipped = filled.min(part.len());
            filled -= skipped;
            let mut spare = &mut part[skipped..];
            while self.decrypted > 0 && !spare.is_empty() {
                let count = self.connection.reader().read(spare)?;
                taken += count;
                self.decrypted -= count;
                spare = &mut spare[count..];
            }
        }
        Ok(taken)
    }
}

/// Translates an error of TLS into one of gradring's.
pub(super) fn refusal(error: &rustls::Error) -> Error {
    use rustls::Error::{
        AlertReceived, InvalidCertificate, InvalidMessage, NoCertificatesPresented,
    };
    match error {
        InvalidCertificate(reason) => wrong_certificate(reason).into(),
        NoCertificatesPresented => NotTrusted::NoCertificate.into(),
        AlertReceived(alert) => NotTrusted::OwnCertificate {
            alert: format!("{alert:?}").into(),
        }
        .into(),
        InvalidMessage(_) => Unusable::AnswersWithoutTls.into(),
        error => Breach::Tls {
            error: Text::of(error),
        }
        .into(),
    }
}

fn wrong_certificate(reason: &CertificateError) -> NotTrusted {
    use CertificateError as C;
    let reason = match reason {
        C::UnknownIssuer | C::BadSignature => return NotTrusted::UnknownAuthority,
        // A wrong clock is as likely as an old certificate.
        C::NotValidYetContext { time, not_before } => {
            let (begin, now) = (utc(not_before.as_secs()), utc(time.as_secs()));
            format!("not valid yet: it is valid from {begin}, and the clock here shows {now}")
                .into()
        }
        C::ExpiredContext { time, not_after } => {
            let (end, now) = (utc(not_after.as_secs()), utc(time.as_secs()));
            format!("expired: it was valid until {end}, and the clock here shows {now}").into()
        }
        reason => Text::of(reason),
    };
    NotTrusted::Certificate { reason }
}

/// Writes seconds since 1970 as in `2026-11-30 18:03 UTC`, by Howard Hinnant's `civil_from_days`.
fn utc(seconds: u64) -> String {
    const DAYS_OF_ERA: u64 = 146_097;
    let (minute, days) = (seconds / 60 % 1440, seconds / 86_400);
    // Years begin in March, so that a leap day is the last of its year; eras have 400 years.
    let days = days + 719_468;
    let (era, day) = (days / DAYS_OF_ERA, days % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year + month / 10, (month + 2) % 12 + 1);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02} UTC",
        minute / 60,
        minute % 60
    )
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_written_as_dates_of_the_calendar() {
        let expected = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_577_836_800, "2020-01-01 00:00 UTC"),
            (1_798_761_599, "2026-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, text) in expected {
            assert_eq!(utc(seconds), text);
        }
    }
}
