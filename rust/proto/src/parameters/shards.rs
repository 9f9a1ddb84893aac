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

/// Shape of a variable: its rows, and the elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The first dimension; 1 for a scalar.
    pub rows: usize,
    /// The product of the other dimensions.
    pub width: usize,
}

/// Places variables on servers so that all servers have about equally many elements.
///
/// A variable above a server's fair share is split between rows. The largest parts are placed
/// first, each on the server with the fewest elements. `placed` has the server of each variable
/// that the program places itself, whole. The result depends on the arguments alone, so all workers
/// and servers compute the same one.
///
/// # Panics
/// If a variable is placed on a server that does not exist.
#[must_use]
pub fn place(
    variables: &[Shape],
    placed: &BTreeMap<usize, usize>,
    servers: usize,
) -> Vec<Vec<VariablePart>> {
    let size = |shape: &Shape| shape.rows * shape.width;
    let total: usize = variables.iter().map(size).sum();
    let share = total.div_ceil(servers).max(1);
    let mut shards = vec![Vec::new(); servers];
    let mut loads = vec![0; servers];
    let mut free = Vec::new();
    for (variable, shape) in variables.iter().enumerate() {
        if let Some(&server) = placed.get(&variable) {
            let elements = 0..size(shape);
            loads[server] += elements.len();
            shards[server].push(VariablePart { variable, elements });
            continue;
        }
        let pieces = size(shape).div_ceil(share).clamp(1, shape.rows.max(1));
        for piece in 0..pieces {
            let row = |piece| piece * shape.rows / pieces * shape.width;
            let elements = row(piece)..row(piece + 1);
            free.push(VariablePart { variable, elements });
        }
    }
    free.sort_by_key(|part| Reverse(part.elements.len()));
    for part in free {
        let server = (0..servers)
            .min_by_key(|&it| loads[it])
            .expect("there is one");
        loads[server] += part.elements.len();
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

    fn shape(rows: usize, width: usize) -> Shape {
        Shape { rows, width }
    }

    #[test]
    fn every_element_is_on_one_server_in_whole_rows_and_loads_are_even() {
        let variables = [
            shape(1000, 64),
            shape(64, 10),
            shape(10, 1),
            shape(1, 1),
            shape(0, 3),
        ];
        for servers in 1..=9 {
            let shards = place(&variables, &BTreeMap::new(), servers);
            for (variable, shape) in variables.iter().enumerate() {
                let mut parts: Vec<_> = shards.iter().flatten().collect();
                parts.retain(|part| part.variable == variable);
                parts.sort_by_key(|part| part.elements.start);
                let mut end = 0;
                for part in parts {
                    assert_eq!(
                        (part.elements.start, part.elements.start % shape.width),
                        (end, 0)
                    );
                    end = part.elements.end;
                }
                assert_eq!(end, shape.rows * shape.width);
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
        let shards = place(&[shape(8, 8), shape(2, 2)], &[(0, 1)].into(), 2);
        let whole = |variable, end| VariablePart {
            variable,
            elements: 0..end,
        };
        assert_eq!(shards, [vec![whole(1, 4)], vec![whole(0, 64)]]);
        // Placed variables count in the loads of servers.
        let shards = place(&[shape(2, 2), shape(1, 4)], &[(0, 0)].into(), 2);
        assert_eq!(shards, [vec![whole(0, 4)], vec![whole(1, 4)]]);
    }
}
