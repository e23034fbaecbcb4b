//! The macro `rows!`: the table of an enum, in which every variant has one row.

/// Defines `ALL` and `row` of an enum from a table, a line for each variant. The compiler refuses a
/// variant without a row.
macro_rules! rows {
    ($(#[$all:meta])* $name:ident: $row:ident { $($variant:ident => $value:expr,)* }) => {
        impl $name {
            $(#[$all])*
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];

            /// Returns the facts of the variant.
            pub const fn row(self) -> &'static $row {
                match self {
                    $(Self::$variant => const { &$value },)*
                }
            }
        }
    };
}
