//! Products of bfloat16 with a packed weight by AVX-512's instruction for them (`VDPBF16PS`): two products a lane, in the
//! order of the inputs.
//!
//! AMD's processors begin one a cycle, which is twice the products of float32. Intel's begin one in two cycles, which is half
//! of them: there bfloat16 is widened and multiplied as float32.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::sync::LazyLock;

use crate::isa::Isa;
use crate::lines::Lines;
use crate::product::{Columns, Terms, add_products};

/// Whether [`add_dots`] is called: the instruction is there, and faster than those of float32.
pub(crate) fn has_dots(isa: Isa) -> bool {
    static IS_FAST: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes) != [*b"Genu", *b"ineI", *b"ntel"]
    });
    isa == Isa::Amx || isa == Isa::Avx512Bf16 && *IS_FAST
}

/// Adds to `columns.out` the products of its rows with the weight. Only for levels that have them ([`has_dots`]).
pub(crate) fn add_dots(isa: Isa, columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn add(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
        add_products::<Dots, __m512, 16>(columns, weight);
    }
    assert!(has_dots(isa));
    // SAFETY: the machine has these instructions, as `Attention` looked up.
    unsafe { add(columns, weight) };
}

/// bfloat16 with bfloat16. To be used only where the machine has the instruction: that is what makes the calls below
/// safe.
struct Dots;

impl Terms<__m512, 16> for Dots {
    type Element = u16;
    type Lane = u32;
    type Inputs = u32;
    type Weights = __m512i;
    const PER_LINE: usize = 2;
    const PARTS: usize = 1;

    #[inline(always)]
    fn inputs(elements: &[u16], _: usize) -> u32 {
        let second = elements.get(1).map_or(0, |&second| u32::from(second));
        u32::from(elements[0]) | second << 16
    }

    #[inline(always)]
    fn weights(line: &[u32; 16], _: usize) -> __m512i {
        // SAFETY: see above; 16 numbers are read.
        unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add(weights: __m512i, inputs: u32, sum: __m512) -> __m512 {
        // SAFETY: see above; vectors of these types have the same size.
        unsafe {
            let inputs = _mm512_set1_epi32(inputs.cast_signed());
            let [weights, inputs] =
                [weights, inputs].map(|bits| transmute::<__m512i, __m512bh>(bits));
            _mm512_dpbf16_ps(sum, weights, inputs)
        }
    }
}
