//! Products of bfloat16 with a packed weight by AVX-512's instruction for them (`VDPBF16PS`): two products a lane, in the
//! order of the inputs.

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::lines::Lines;
use crate::product::{Columns, Terms, add_products};

/// Adds to `columns.out` the products of its rows with the weight. Only for [`crate::Isa::Avx512Bf16`].
pub(crate) fn add_dots(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn add(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
        add_products::<Dots, __m512, 16>(columns, weight);
    }
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

    #[inline(always)]
    fn inputs(elements: &[u16]) -> u32 {
        u32::from(elements[0]) | u32::from(elements[1]) << 16
    }

    #[inline(always)]
    fn last_input(element: u16) -> u32 {
        u32::from(element)
    }

    #[inline(always)]
    fn weights(line: &[u32; 16]) -> __m512i {
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

    #[inline(always)]
    fn add_last(weights: __m512i, inputs: u32, sum: __m512) -> __m512 {
        Self::add(weights, inputs, sum)
    }
}
