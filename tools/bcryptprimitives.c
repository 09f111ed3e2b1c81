/* For `make test-windows`: the one function of bcryptprimitives.dll that Rust's standard library calls. wine has
   that library from version 9 on; Debian 12 has wine 8. */
#include <windows.h>
#include <ntsecapi.h>

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T length) {
    return RtlGenRandom(bytes, (ULONG)length);
}
