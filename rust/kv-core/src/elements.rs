//! Elements of arrays that other code may read and write at any time.

use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

macro_rules! shared_ints {
    ($($(#[$doc:meta])* $name:ident: $atomic:ty, $int:ty;)*) => {
        $(
            $(#[$doc])*
            ///
            /// Every access is a relaxed atomic one: a thread that reads while another writes gets the old value or
            /// the new one. Accesses are not ordered, and no access waits. Memory layout is that of the integer.
            #[derive(Debug, Default)]
            #[repr(transparent)]
            pub struct $name($atomic);

            impl $name {
                /// An element that holds `value`.
                #[must_use]
                pub const fn new(value: $int) -> Self {
                    Self(<$atomic>::new(value))
                }

                /// The value.
                #[inline]
                #[must_use]
                pub fn get(&self) -> $int {
                    self.0.load(Ordering::Relaxed)
                }

                /// Replaces the value.
                #[inline]
                pub fn set(&self, value: $int) {
                    self.0.store(value, Ordering::Relaxed);
                }
            }

            impl Clone for $name {
                fn clone(&self) -> Self {
                    Self::new(self.get())
                }
            }
        )*
    };
}

shared_ints! {
    /// A 32-bit integer of a caller's array.
    SharedI32: AtomicI32, i32;
    /// A 64-bit integer of a caller's array.
    SharedI64: AtomicI64, i64;
}
