//! The level of instructions that is used: the best one, or one that the environment names.

use std::env;

use crate::error::Error;
use crate::isa::Isa;

impl Isa {
    /// The best that this machine has, or a lower level that [`Isa::SWITCH`] names.
    ///
    /// # Errors
    ///
    /// The switch names no level, or one that this machine lacks.
    pub fn chosen() -> Result<Self, Error> {
        match env::var_os(Self::SWITCH) {
            Some(name) if !name.is_empty() => Self::asked_for(&name.to_string_lossy()),
            _ => Ok(Self::detect()),
        }
    }

    fn asked_for(name: &str) -> Result<Self, Error> {
        let isa = Self::named(name).ok_or_else(|| Error::UnknownIsa(name.to_owned()))?;
        isa.checked()
    }

    /// The same, if this machine has it.
    pub(crate) fn checked(self) -> Result<Self, Error> {
        match self.is_there() {
            true => Ok(self),
            false => Err(Error::Isa {
                wanted: self,
                best: Self::detect(),
            }),
        }
    }

    /// Whether the chosen instructions multiply and add with one rounding. Without, the kernel is right,
    /// and slow.
    ///
    /// # Errors
    ///
    /// As [`Isa::chosen`].
    pub fn is_fast() -> Result<bool, Error> {
        let always = cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64");
        Self::chosen().map(|isa| always || isa != Self::Portable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_takes_names_of_levels_that_are_there() {
        for isa in Isa::ALL {
            let best = Isa::detect();
            let expected = match isa.is_there() {
                true => Ok(isa),
                false => Err(Error::Isa { wanted: isa, best }),
            };
            assert_eq!(Isa::asked_for(isa.name()), expected);
        }
        for name in ["AVX2", "avx", "0", "amx "] {
            let refused = Isa::asked_for(name).expect_err("there is none of this name");
            let text = refused.to_string();
            assert!(
                text.contains(&format!("PYENGINE_CPU_ISA={name:?}")),
                "{text}"
            );
            assert!(
                text.contains("plain, neon, avx2, avx512, avx512_bf16, amx"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_level_that_is_not_there_is_refused_and_not_lowered() {
        assert!(Isa::detect().is_there() && Isa::Portable.is_there());
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_there()) {
            let refused = crate::Attention::with_isa(1, isa).expect_err("it is not there");
            let (wanted, best) = (isa.name(), Isa::detect().name());
            let text = format!("this processor has no {wanted}: the best level it has is {best}");
            assert_eq!(refused.to_string(), text);
        }
    }
}
