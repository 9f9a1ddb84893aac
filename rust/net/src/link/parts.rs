//! Several slices of bytes that follow each other.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

/// Returns the total length of `parts` in bytes.
pub(super) fn length(parts: &[IoSlice<'_>]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// Returns the slices of a range of bytes in the concatenated `parts`.
pub(super) fn within<'a>(
    parts: &'a [IoSlice<'_>],
    range: Range<usize>,
) -> impl Iterator<Item = &'a [u8]> {
    let mut start = 0;
    parts.iter().filter_map(move |part| {
        let end = start + part.len();
        let inside = range.start.clamp(start, end) - start..range.end.clamp(start, end) - start;
        start = end;
        (!inside.is_empty()).then(|| &part[inside])
    })
}

/// Fills `slices` with a range of bytes in the concatenated `parts`; returns the number of slices
/// filled.
pub(super) fn select<'a>(
    parts: &'a [IoSlice<'_>],
    range: Range<usize>,
    slices: &mut [IoSlice<'a>],
) -> usize {
    let selected = within(parts, range).zip(slices);
    selected
        .map(|(part, slice)| *slice = IoSlice::new(part))
        .count()
}

/// Copies `bytes` into `parts` until these are full; returns the number of bytes copied.
pub(super) fn scatter(bytes: &[u8], parts: &mut [IoSliceMut<'_>]) -> usize {
    let mut left = bytes;
    for part in parts {
        let (now, later) = left.split_at(left.len().min(part.len()));
        part[..now.len()].copy_from_slice(now);
        left = later;
    }
    bytes.len() - left.len()
}
