//! Placement of variables: which server keeps which part of each variable.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// A part of a variable on one server, as a range of elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VariablePart {
    /// Index of the variable.
    pub variable: usize,
    /// Elements of whole rows.
    pub elements: Range<usize>,
}

/// Extent of a variable: its rows, the elements of a row, and the bytes of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first dimension; 1 for a scalar.
    pub rows: usize,
    /// The product of the other dimensions.
    pub width: usize,
    /// Size of an element in bytes.
    pub element_bytes: usize,
}

impl Extent {
    const fn elements(&self) -> usize {
        self.rows * self.width
    }

    const fn size_bytes(&self) -> usize {
        self.elements() * self.element_bytes
    }
}

/// Places variables on servers so that all servers have about equally many bytes.
///
/// A variable above a server's fair share is split between rows. The largest parts are placed
/// first, each on the server with the fewest bytes. `placed` has the server of each variable
/// that the program places itself, whole. The result depends on the arguments alone, so all workers
/// and servers compute the same one.
///
/// # Panics
/// If a variable is placed on a server that does not exist.
#[must_use]
pub fn place(
    variables: &[Extent],
    placed: &BTreeMap<usize, usize>,
    servers: usize,
) -> Vec<Vec<VariablePart>> {
    let total: usize = variables.iter().map(Extent::size_bytes).sum();
    let share = total.div_ceil(servers).max(1);
    let mut shards = vec![Vec::new(); servers];
    let mut loads = vec![0; servers];
    let mut free = Vec::new();
    let size = |part: &VariablePart| part.elements.len() * variables[part.variable].element_bytes;
    for (variable, extent) in variables.iter().enumerate() {
        if let Some(&server) = placed.get(&variable) {
            let elements = 0..extent.elements();
            loads[server] += extent.size_bytes();
            shards[server].push(VariablePart { variable, elements });
            continue;
        }
        let pieces = extent.size_bytes().div_ceil(share);
        let pieces = pieces.clamp(1, extent.rows.max(1));
        for piece in 0..pieces {
            let row = |piece| piece * extent.rows / pieces * extent.width;
            let elements = row(piece)..row(piece + 1);
            free.push(VariablePart { variable, elements });
        }
    }
    free.sort_by_key(|part| Reverse(size(part)));
    for part in free {
        let server = (0..servers)
            .min_by_key(|&it| loads[it])
            .expect("there is one");
        loads[server] += size(&part);
        shards[server].push(part);
    }
    for parts in &mut shards {
        parts.sort_by_key(|part| (part.variable, part.elements.start));
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The extent of a variable of float32.
    fn f32(rows: usize, width: usize) -> Extent {
        Extent {
            rows,
            width,
            element_bytes: 4,
        }
    }

    #[test]
    fn every_element_is_on_one_server_in_whole_rows_and_loads_are_even() {
        let variables = [f32(1000, 64), f32(64, 10), f32(10, 1), f32(1, 1), f32(0, 3)];
        for servers in 1..=9 {
            let shards = place(&variables, &BTreeMap::new(), servers);
            for (variable, extent) in variables.iter().enumerate() {
                let mut parts: Vec<_> = shards.iter().flatten().collect();
                parts.retain(|part| part.variable == variable);
                parts.sort_by_key(|part| part.elements.start);
                let mut end = 0;
                for part in parts {
                    assert_eq!(
                        (part.elements.start, part.elements.start % extent.width),
                        (end, 0)
                    );
                    end = part.elements.end;
                }
                assert_eq!(end, extent.rows * extent.width);
            }
            let loads = shards
                .iter()
                .map(|parts| parts.iter().map(|it| it.elements.len()).sum());
            let (least, most) = (loads.clone().min(), loads.max());
            assert!(
                most.unwrap_or(0) <= 2 * least.unwrap_or(0) + 64,
                "{servers}: {least:?} {most:?}"
            );
        }
    }

    #[test]
    fn what_the_program_places_stays_whole_and_there() {
        let shards = place(&[f32(8, 8), f32(2, 2)], &[(0, 1)].into(), 2);
        let whole = |variable, end| VariablePart {
            variable,
            elements: 0..end,
        };
        assert_eq!(shards, [vec![whole(1, 4)], vec![whole(0, 64)]]);
        // Placed variables count in the loads of servers.
        let shards = place(&[f32(2, 2), f32(1, 4)], &[(0, 0)].into(), 2);
        assert_eq!(shards, [vec![whole(0, 4)], vec![whole(1, 4)]]);
    }

    #[test]
    fn elements_of_twice_the_size_count_twice() {
        let wide = Extent {
            element_bytes: 8,
            ..f32(10, 1)
        };
        let shards = place(&[wide, f32(10, 1), f32(10, 1)], &BTreeMap::new(), 2);
        let bytes = |parts: &Vec<VariablePart>| -> usize {
            let size = |part: &VariablePart| part.elements.len() * [8, 4, 4][part.variable];
            parts.iter().map(size).sum()
        };
        assert_eq!([80, 80], [bytes(&shards[0]), bytes(&shards[1])]);
    }
}
