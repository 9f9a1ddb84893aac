//! Enums whose values have the same names in every interface.

/// Makes an enum of values with names, and a list of all of them.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* pub enum $type:ident {
        $($(#[$doc:meta])* $value:ident $(= $number:literal)?: $name:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type {
            $($(#[$doc])* $value $(= $number)?,)*
        }

        impl $type {
            /// Every value, for tests and for tables.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$value),*];

            /// The name used in every interface.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }

            /// The value with this name, if there is one.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.name() == name)
            }
        }
    };
}

#[doc(inline)]
pub use named;
