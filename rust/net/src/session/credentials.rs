//! Credentials: job id, token and certificates with which processes of a job authenticate each
//! other.

use std::sync::Arc;

use crate::config::{Config, TlsFiles};
use crate::link::tcp::tls::Tls;
use gradring_proto::error::{NotFormed, Result};

/// Credentials of a process, which it also requires of peers. They hold a secret, so they are never
/// printed.
pub struct Credentials {
    /// Job id; empty for none.
    pub job: String,
    /// Shared secret of the job; empty for none.
    pub(crate) token: Vec<u8>,
    /// Certificates and key, if connections use TLS.
    pub(crate) tls: Option<Tls>,
}

impl Credentials {
    /// Returns the credentials of a group; reads the files for TLS.
    ///
    /// # Errors
    /// `Config` when one of the files cannot be read or used.
    pub fn of(config: &Config) -> Result<Arc<Self>> {
        let mut credentials = Self::load(&config.token, config.tls.as_ref())?;
        credentials.job.clone_from(&config.job);
        Ok(Arc::new(credentials))
    }

    /// Returns credentials without a job id, for a process whose peers do not check it.
    ///
    /// # Errors
    /// Same as for `of`.
    pub fn load(token: &[u8], tls: Option<&TlsFiles>) -> Result<Self> {
        Ok(Self {
            job: String::new(),
            token: token.to_vec(),
            tls: tls.map(Tls::load).transpose()?,
        })
    }

    /// Checks that `theirs`, the job id of an initiator that knows the token, is this process's.
    ///
    /// # Errors
    /// `Rendezvous` with both job ids if they differ.
    pub fn check_job(&self, theirs: &str, (initiator, responder): (usize, usize)) -> Result<()> {
        if theirs == self.job {
            return Ok(());
        }
        Err(NotFormed::OtherJob {
            initiator,
            theirs: theirs.into(),
            responder,
            ours: self.job.as_str().into(),
        }
        .into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_job_is_named_beside_this_one() {
        let mut config = Config::new(0, 1, "");
        config.job = "slurm 1".into();
        let credentials = Credentials::of(&config).unwrap();
        credentials.check_job("slurm 1", (3, 0)).unwrap();
        let error = credentials.check_job("slurm 2", (3, 0)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("slurm 1"), "{text}");
        assert!(text.contains("slurm 2"), "{text}");
    }
}
