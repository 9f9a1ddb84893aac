//! Row counts that other ranks announce before this rank allocates memory for the rows.

use super::Communicator;
use crate::engine::Supervisor as _;
use gradring_proto::error::{Breach, Error, Result};

impl Communicator {
    /// Converts the `rows` that each rank announced in `call` into elements. One row has `elements`
    /// elements of `bytes` bytes each.
    ///
    /// # Errors
    /// All ranks fail: with `Protocol` for an impossible number of rows; with `Exhausted` if the
    /// rows need more memory than this host has.
    pub fn elements_of_rows(
        &self,
        rows: &[i64],
        (elements, bytes): (usize, usize),
        call: &str,
    ) -> Result<Vec<usize>> {
        let counts = counted(rows, elements, bytes).map_err(|peer| {
            let (rows, call) = (rows[peer], call.into());
            let error = Error::from(Breach::Rows { rows, call });
            let error = error.blaming(peer, self.roster.host(peer));
            self.monitor.abort(error.clone());
            self.abort.cause().unwrap_or(error)
        })?;
        let bytes = counts.iter().sum::<usize>() * bytes;
        if bytes > memory_of_host() {
            let peer = (0..rows.len()).max_by_key(|&rank| rows[rank]).unwrap_or(0);
            let what = format!("{call}, most of it from rank {peer}");
            return Err(self.fail_without_memory(bytes, &what));
        }
        Ok(counts)
    }
}

/// Returns the elements in each of `rows`, or the first rank with an impossible number. A negative
/// number is impossible, and one with which the rows of all ranks could exceed the address space.
fn counted(rows: &[i64], elements: usize, bytes: usize) -> Result<Vec<usize>, usize> {
    let bytes_of_all = elements.max(1).saturating_mul(bytes.max(1));
    let most = isize::MAX.unsigned_abs() / bytes_of_all.saturating_mul(rows.len());
    let counted = rows.iter().enumerate().map(|(rank, rows)| {
        let rows = usize::try_from(*rows).ok().filter(|rows| *rows <= most);
        Ok(rows.ok_or(rank)? * elements)
    });
    counted.collect()
}

/// Bytes of memory and swap on this host.
fn memory_of_host() -> usize {
    let host = rustix::system::sysinfo();
    let units = u128::from(host.totalram) + u128::from(host.totalswap);
    usize::try_from(units * u128::from(host.mem_unit)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_in_elements() {
        assert_eq!(counted(&[2, 0, 3], 5, 4), Ok(vec![10, 0, 15]));
        // Rows may have no elements.
        assert_eq!(counted(&[2, 1], 0, 8), Ok(vec![0, 0]));
        assert_eq!(counted(&[1 << 40], 1, 4), Ok(vec![1 << 40]));
    }

    #[test]
    fn the_rank_that_cannot_have_so_many_rows_is_found() {
        assert_eq!(counted(&[2, -1], 5, 4), Err(1));
        assert_eq!(counted(&[2, i64::MIN], 0, 4), Err(1));
        for rows in [i64::MAX, i64::MAX / 2, i64::MAX / 16 + 1] {
            assert_eq!(counted(&[rows, 1], 1, 8), Err(0), "{rows}");
            assert_eq!(counted(&[1, rows], 8, 1), Err(1), "{rows}");
        }
        assert_eq!(counted(&[i64::MAX / 2 + 1, 0], 0, 1), Err(0));
        assert_eq!(counted(&[1], usize::MAX, 8), Err(0));
    }

    #[test]
    fn this_host_has_memory() {
        assert!(memory_of_host() > 64 << 20);
    }
}
