//! Which instructions compute.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::env;

#[cfg(target_arch = "x86_64")]
use crate::amx::Amx;
use crate::attention::{Job, Task};
#[cfg(target_arch = "x86_64")]
use crate::bf16::Bf16;
use crate::element::Element;
use crate::error::Error;
use crate::floats::Floats;
use crate::kernel::work;
#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// Which build of the arithmetic runs. All but the last two give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the target has in any case.
    Portable,
    /// Arm's 128-bit vectors.
    Neon,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with the parts of AVX-512 that servers have had since 2017.
    Avx512,
    /// The same with its products of bfloat16, where that is what is multiplied.
    Avx512Bf16,
    /// The same with AMX, for bfloat16.
    Amx,
}

impl Isa {
    /// All of them, the lowest first.
    pub const ALL: [Self; 6] = [
        Self::Portable,
        Self::Neon,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
    ];

    /// The environment variable that lowers the level: the name of one that this machine has.
    pub const SWITCH: &str = "PYENGINE_CPU_ISA";

    /// Its name in the switch and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "plain",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }

    /// The level of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// Whether this machine has these instructions, the switch aside.
    #[must_use]
    pub fn is_there(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"), // every such target has them
            _ => cfg!(target_arch = "x86_64") && self <= Self::detect(),
        }
    }

    /// The best that this machine has, the switch aside.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let is_wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return match is_wide {
                true if tiles::is_there() => Self::Amx,
                true if is_x86_feature_detected!("avx512bf16") => Self::Avx512Bf16,
                true => Self::Avx512,
                false => Self::Avx2,
            };
        }
        #[cfg(target_arch = "aarch64")]
        return Self::Neon;
        #[allow(unreachable_code)] // but for x86-64 and others
        Self::Portable
    }

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
                asked: self,
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

/// [`work`] in floats with these instructions, which the machine has: an [`crate::Attention`] takes no others.
pub(crate) fn in_floats<E: Element>(isa: Isa, job: &Job<'_, E>, task: Task<'_, '_, E>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2<E: Element>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<__m256, 8, 8>, 8>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512<E: Element>(job: &Job<'_, E>, task: Task<'_, '_, E>) {
            work::<E, Floats<__m512, 16, 16>, 16>(job, task);
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(job, task) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(job, task) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        return work::<E, Floats<[float32x4_t; 2], 8, 8>, 8>(job, task);
    }
    let _ = isa;
    work::<E, Floats<[f32; 8], 8, 8>, 8>(job, task);
}

/// [`work`] in bfloat16 where these instructions can, else in floats.
pub(crate) fn in_halves(isa: Isa, job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn bf16(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Bf16, 16>(job, task);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn amx(job: &Job<'_, u16>, task: Task<'_, '_, u16>) {
            work::<u16, Amx, 16>(job, task);
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx if Amx::takes(&job.shape) => return unsafe { amx(job, task) },
            // SAFETY: as above.
            Isa::Avx512Bf16 if Bf16::takes(&job.shape) => return unsafe { bf16(job, task) },
            _ => {}
        }
    }
    in_floats(isa, job, task);
}

/// What is compiled for each set of instructions.
pub(crate) trait InEachBuild {
    /// Inlined, so that it takes the instructions of its caller.
    fn run(self);
}

/// Runs it with these instructions, which the machine has.
pub(crate) fn best_build(isa: Isa, work: impl InEachBuild) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(work: impl InEachBuild) {
            work.run();
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(work: impl InEachBuild) {
            work.run();
        }
        #[allow(unsafe_code)]
        match isa {
            // SAFETY: the machine has these instructions, as `Attention` looked up.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Neon | Isa::Portable => {}
        }
    }
    let _ = isa; // what the compiler makes of plain Rust has NEON wherever that is
    work.run();
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
                false => Err(Error::Isa { asked: isa, best }),
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
            let (asked, best) = (isa.name(), Isa::detect().name());
            let text = format!("this processor has no {asked}: the best level it has is {best}");
            assert_eq!(refused.to_string(), text);
        }
    }
}
