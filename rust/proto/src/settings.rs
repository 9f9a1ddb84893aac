//! Tables of settings. Their rows define a struct, its defaults, and how its values are read,
//! compared and shown.

use std::time::Duration;

use crate::dtype::DType;
use crate::error::{Error, Result, Unusable};
use crate::schedule::algorithm_rules::Rules;

/// Longest accepted duration in seconds: a century, as good as for ever, and in range of every
/// clock.
pub const LONGEST_S: f64 = 100.0 * 365.0 * 86_400.0;

/// A type of values that are read from text and shown to people.
pub trait Value: Sized {
    /// Reads the value of setting `name` from `text`.
    fn read(name: &str, text: &str) -> Result<Self>;

    /// The value as text, as processes compare it.
    fn shown(&self) -> String;
}

/// Makes a struct with a field for each row: name, type, default as text, whether all processes
/// need the same value, and description. Fields in a second block are set by code only, never from
/// text.
#[doc(hidden)]
#[macro_export]
macro_rules! settings_table {
    ($(#[$doc:meta])* pub struct $table:ident {
        $($name:ident: $type:ty = $default:literal, $agreed:expr, $meaning:literal;)*
    } $(and {
        $($(#[$unsaid_doc:meta])* $unsaid:ident: $unsaid_type:ty,)*
    })?) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $table {
            $(#[doc = $meaning] pub $name: $type,)*
            $($($(#[$unsaid_doc])* pub $unsaid: $unsaid_type,)*)?
        }

        impl Default for $table {
            fn default() -> Self {
                use $crate::settings::Value as _;
                Self {
                    $($name: <$type>::read(stringify!($name), $default).expect("a default can be used"),)*
                    $($($unsaid: Default::default(),)*)?
                }
            }
        }

        impl $table {
            /// The defaults, except for the values in `texts`, by name.
            ///
            /// # Errors
            /// `Config` when there is no such name, or the text is not a value for it.
            pub fn of(texts: &std::collections::BTreeMap<String, String>) -> $crate::error::Result<Self> {
                use $crate::settings::Value as _;
                let mut table = Self::default();
                for (name, text) in texts {
                    match name.as_str() {
                        $(stringify!($name) => table.$name = <$type>::read(name, text)?,)*
                        name => return Err($crate::error::Unusable::NoSuchSetting { name: name.into() }.into()),
                    }
                }
                Ok(table)
            }

            /// All values that must be equal in all processes, as text.
            pub fn compared(&self) -> String {
                use $crate::settings::Value as _;
                let all = [$(($agreed, stringify!($name), self.$name.shown())),*];
                let agreed = all.into_iter().filter(|(agreed, ..)| *agreed);
                let texts: Vec<_> = agreed.map(|(_, name, text)| format!("{name}={text}")).collect();
                texts.join(", ")
            }
        }
    };
}

#[doc(inline)]
pub use settings_table as table;

/// The error for a value that a setting cannot have.
#[must_use]
pub fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    let (name, value, wanted) = (name.into(), value.into(), wanted.into());
    Unusable::Value {
        name,
        value,
        wanted,
    }
    .into()
}

macro_rules! whole {
    ($($number:ty),*) => { $(
        impl Value for $number {
            fn read(name: &str, text: &str) -> Result<Self> {
                text.parse().map_err(|_| wrong(name, text, "a whole number"))
            }

            fn shown(&self) -> String {
                self.to_string()
            }
        }
    )* };
}

whole!(u32, u64, usize);

impl Value for Option<u64> {
    fn read(name: &str, text: &str) -> Result<Self> {
        match text {
            "None" => Ok(None),
            _ => u64::read(name, text).map(Some),
        }
    }

    fn shown(&self) -> String {
        self.map_or("None".into(), |it| it.to_string())
    }
}

impl Value for bool {
    fn read(name: &str, text: &str) -> Result<Self> {
        match text {
            "1" | "True" => Ok(true),
            "0" | "False" => Ok(false),
            _ => Err(wrong(name, text, "1 or 0")),
        }
    }

    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Value for Duration {
    fn read(name: &str, text: &str) -> Result<Self> {
        let seconds = text.parse::<f64>().ok();
        seconds
            .and_then(|seconds| Self::try_from_secs_f64(seconds.min(LONGEST_S)).ok())
            .ok_or_else(|| wrong(name, text, "a number of seconds"))
    }

    fn shown(&self) -> String {
        self.as_secs_f64().to_string()
    }
}

impl Value for Rules {
    fn read(_: &str, text: &str) -> Result<Self> {
        Self::parse(text)
    }

    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Value for Option<DType> {
    fn read(name: &str, text: &str) -> Result<Self> {
        if text.is_empty() {
            return Ok(None);
        }
        DType::from_name(text)
            .map(Some)
            .ok_or_else(|| wrong(name, text, "an element type"))
    }

    fn shown(&self) -> String {
        self.map_or("None", DType::name).into()
    }
}

/// A name that is checked where it is used.
impl Value for String {
    fn read(_name: &str, text: &str) -> Result<Self> {
        Ok(text.into())
    }

    fn shown(&self) -> String {
        self.clone()
    }
}

/// Makes enums with names usable as values of settings.
#[doc(hidden)]
#[macro_export]
macro_rules! named_values {
    ($($named:ty),*) => { $(
        impl $crate::settings::Value for $named {
            fn read(name: &str, text: &str) -> $crate::error::Result<Self> {
                let wanted = || Self::ALL.map(Self::name).join(" or ");
                Self::from_name(text).ok_or_else(|| $crate::settings::wrong(name, text, &wanted()))
            }

            fn shown(&self) -> String {
                self.name().into()
            }
        }
    )* };
}

#[doc(inline)]
pub use named_values;
