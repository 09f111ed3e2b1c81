// The CUDA runtime that the planner asks: a GPU with so many processors, of compute capability 9.0.
#include <cstdlib>
#include <cstring>

extern "C" {
int cudaGetDevice(int* device) { return *device = 0; }

int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16: *value = atoi(getenv("PROCESSORS")); break;
    case 75: *value = 9; break;               // major
    case 76: *value = 0; break;               // minor
    case 81: *value = 233472; break;          // shared memory of a processor
    case 97: *value = 232448; break;          // of a block
    default: *value = 0;
  }
  return 0;
}

int cudaMemcpyAsync(void* target, const void* source, size_t size, int, void*) {
  if (size) memcpy(target, source, size);
  return 0;
}

const char* cudaGetErrorString(int) { return "an error of a runtime that is not there"; }
int __cudaRegisterFatBinary() { return 0; }
int __cudaRegisterFatBinaryEnd() { return 0; }
int __cudaRegisterVar() { return 0; }
int __cudaUnregisterFatBinary() { return 0; }
}
