//! Rules of a user about algorithms, as text and as data.

use std::fmt;

use super::Algorithm;
use super::topology::Topology;
use crate::collective::Call;
use crate::error::{BadRules, Error, Result, Unusable};

/// A user's choice: algorithms, each with its largest buffer in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(Vec<(Algorithm, usize)>);

impl Rules {
    /// Reads `auto`, the name of an algorithm, or a list such as `one_shot:64KiB,direct:8MiB,ring`:
    /// each algorithm up to its size, and the last one for everything else.
    ///
    /// # Errors
    /// `Config` for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::default());
        }
        let wrong = |problem| {
            Error::from(Unusable::Algorithm {
                value: text.into(),
                problem,
                known: Algorithm::ALL.map(Algorithm::name).join(", ").into(),
            })
        };
        let mut rules: Vec<(Algorithm, usize)> = Vec::new();
        for part in text.split(',') {
            let (name, limit) = match part.split_once(':') {
                Some((name, limit)) => (name, bytes(limit)),
                None => (part, Some(usize::MAX)),
            };
            let algorithm = Algorithm::from_name(name)
                .ok_or_else(|| wrong(BadRules::NoAlgorithm { name: name.into() }))?;
            let limit = limit.ok_or_else(|| wrong(BadRules::NoSize { part: part.into() }))?;
            if rules.last().is_some_and(|&(_, before)| before >= limit) {
                return Err(wrong(BadRules::SizesShrink));
            }
            rules.push((algorithm, limit));
        }
        Ok(Self(rules))
    }

    /// One algorithm for everything that it performs.
    #[must_use]
    pub fn always(algorithm: Algorithm) -> Self {
        Self(vec![(algorithm, usize::MAX)])
    }

    pub(super) fn parts(&self) -> &[(Algorithm, usize)] {
        &self.0
    }

    /// The first algorithm that has a rule for this size and performs `call`.
    pub(super) fn choose(&self, call: &Call, topology: &Topology) -> Option<Algorithm> {
        let bytes = call.bytes();
        let fits = |&&(algorithm, limit): &&(Algorithm, usize)| {
            bytes <= limit && algorithm.performs(&call.collective, topology)
        };
        self.0.iter().find(fits).map(|rule| rule.0)
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("auto");
        }
        for (number, &(algorithm, limit)) in self.0.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            write!(f, "{comma}{}", algorithm.name())?;
            if limit < usize::MAX {
                write!(f, ":{limit}")?;
            }
        }
        Ok(())
    }
}

/// A number of bytes such as `4096`, `64KiB` or `8MiB`.
fn bytes(text: &str) -> Option<usize> {
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let factor = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_in_any_unit() {
        let rules = Rules::parse("one_shot:8B,star:4KiB,direct:3MiB,ring:2GiB,halving").unwrap();
        let limits: Vec<_> = rules.parts().iter().map(|(_, limit)| *limit).collect();
        assert_eq!(limits, [8, 4 << 10, 3 << 20, 2 << 30, usize::MAX]);
        assert_eq!(
            Rules::parse("ring").unwrap(),
            Rules::always(Algorithm::Ring)
        );
    }

    #[test]
    fn rules_that_cannot_be_read_are_refused() {
        for text in [
            "",
            "rings",
            "ring:",
            "ring:4KB",
            "direct:8MiB,one_shot:4KiB,ring",
            "ring,",
        ] {
            let error = Rules::parse(text).map(|_| text).unwrap_err();
            assert!(error.to_string().contains("algorithm="), "{error}");
        }
    }
}
