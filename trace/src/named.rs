//! Enums whose variants are listed, and may have names and numbers: each is stated once, beside its variant.

/// Declares an enum. `A => "a"` gives a variant a name, `A = 1` a number in shared memory and in the trace file, and
/// `A = 1 => "a"` both.
///
/// Names give `ALL`, `name` and `from_name`; numbers give `ALL` and `from_wire`; variants without either give `ALL`.
/// With `serde` in front, the derived `Serialize`, `Deserialize` and `JsonSchema` use the names too.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $Type:ident { $($(#[$doc:meta])* $Variant:ident => $name:literal),* $(,)? }) => {
        $(#[$meta])*
        $vis enum $Type { $($(#[$doc])* $Variant,)* }
        $crate::named!(@all $vis $Type { $($Variant)* });
        $crate::named!(@names $vis $Type { $($Variant $name)* });
    };
    (
        serde $(#[$meta:meta])*
        $vis:vis enum $Type:ident { $($(#[$doc:meta])* $Variant:ident => $name:literal),* $(,)? }
    ) => {
        $crate::named! { $(#[$meta])* $vis enum $Type { $($(#[$doc])* #[serde(rename = $name)] $Variant => $name,)* } }
    };
    (
        $(#[$meta:meta])*
        $vis:vis enum $Type:ident { $($(#[$doc:meta])* $Variant:ident = $number:literal => $name:literal),* $(,)? }
    ) => {
        $crate::named! { $(#[$meta])* $vis enum $Type { $($(#[$doc])* $Variant = $number,)* } }
        $crate::named!(@names $vis $Type { $($Variant $name)* });
    };
    ($(#[$meta:meta])* $vis:vis enum $Type:ident { $($(#[$doc:meta])* $Variant:ident = $number:literal),* $(,)? }) => {
        $(#[$meta])*
        #[repr(u8)]
        $vis enum $Type { $($(#[$doc])* $Variant = $number,)* }
        $crate::named!(@all $vis $Type { $($Variant)* });
        impl $Type {
            /// The value with this number. `None` for a number of a newer build.
            #[inline]
            $vis const fn from_wire(number: u64) -> Option<$Type> {
                match number { $($number => Some($Type::$Variant),)* _ => None }
            }
        }
    };
    ($(#[$meta:meta])* $vis:vis enum $Type:ident { $($(#[$doc:meta])* $Variant:ident),* $(,)? }) => {
        $(#[$meta])*
        $vis enum $Type { $($(#[$doc])* $Variant,)* }
        $crate::named!(@all $vis $Type { $($Variant)* });
    };
    (@all $vis:vis $Type:ident { $($Variant:ident)* }) => {
        impl $Type {
            /// All values.
            $vis const ALL: [$Type; [$($Type::$Variant),*].len()] = [$($Type::$Variant),*];
        }
    };
    (@names $vis:vis $Type:ident { $($Variant:ident $name:literal)* }) => {
        impl $Type {
            /// The name in formats and on the command line.
            $vis const fn name(self) -> &'static str {
                match self { $($Type::$Variant => $name,)* }
            }

            /// The value with this name. `None` if there is none.
            $vis fn from_name(name: &str) -> Option<$Type> {
                match name { $($name => Some($Type::$Variant),)* _ => None }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    named! {
        /// A color.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        enum Color {
            /// Like grass.
            Green = 1 => "green",
            Red = 4 => "red",
        }
    }

    #[test]
    fn names_and_numbers_are_those_of_the_declaration() {
        assert_eq!(Color::ALL, [Color::Green, Color::Red]);
        for (color, number, name) in [(Color::Green, 1, "green"), (Color::Red, 4, "red")] {
            assert_eq!((color as u64, color.name()), (number, name));
            assert_eq!((Color::from_wire(number), Color::from_name(name)), (Some(color), Some(color)));
        }
        assert_eq!((Color::from_wire(0), Color::from_name("Red")), (None, None));
    }
}
