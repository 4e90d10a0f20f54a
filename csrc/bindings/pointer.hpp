// Turns the integer addresses that Python passes into pointers.
#pragma once

#include <cstdint>

namespace ep {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ep
