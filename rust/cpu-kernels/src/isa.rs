//! Levels of instructions, and which of them this machine has.

#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// A level of instructions. All but the last two give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The baseline of the target.
    Portable,
    /// Arm's 128-bit vectors.
    Neon,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with the parts of AVX-512 that servers have had since 2017.
    Avx512,
    /// The same with its products of bfloat16, where that is what is multiplied.
    Avx512Bf16,
    /// The same with AMX, for bfloat16 and for weights in few bits.
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

    /// Whether a model in plain Rust stands for these instructions: in builds for tests (feature `modelled-tiles`).
    #[must_use]
    pub fn is_modelled(self) -> bool {
        cfg!(feature = "modelled-tiles") && self == Self::Amx
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
}
