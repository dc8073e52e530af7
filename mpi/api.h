// The functions of MPI that the library calls, as a table that does not tell which MPI it is. A
// module for each family of MPIs (mpi/module) fills it, since handles, constants and the status of
// MPI differ between them. <mpi.h> is known there alone, so that one build of the library serves
// every MPI.
#pragma once

#include <cstdint>

namespace sirtaki::mpi {

// A handle of MPI, whatever it is there; 0 is MPI's null handle. MPI writes it where it lies.
template <char kind>
struct Handle {
  std::uintptr_t bits = 0;

  bool is_null() const { return bits == 0; }
  bool operator==(const Handle&) const = default;
};
using Comm = Handle<'c'>;
using Request = Handle<'r'>;
using Message = Handle<'m'>;

// What a receive or a probe says of itself.
struct Received {
  int source = -1;
  int tag = -1;
  int bytes = 0;
  int error = 0;
  bool cancelled = false;
};

enum class ThreadLevel : int { kSingle, kFunneled, kSerialized, kMultiple };

// Each function does what MPI's of its name does, and returns its code; 0 is success. Texts end with a
// zero within the given bytes.
struct Api {
  // The version of this struct: a module with another one, or of another size, is refused.
  static constexpr std::uint32_t kVersion = 2;
  std::uint32_t version;
  std::uint32_t bytes;

  int (*GetLibraryVersion)(char* text, int bytes);
  int (*ErrorString)(int code, char* text, int bytes);
  int (*GetProcessorName)(char* text, int bytes);

  int (*Initialized)(int* is);
  int (*Finalized)(int* is);
  int (*InitThread)(ThreadLevel* level);  // asks for MPI_THREAD_MULTIPLE
  int (*QueryThread)(ThreadLevel* level);
  int (*IsThreadMain)(int* is);
  int (*Finalize)();
  // Whether MPI has a control variable of this name.
  bool (*HasVariable)(const char* name);
  // Calls `function(value)` at the beginning of MPI_Finalize, once; CancelAtFinalize takes the key.
  int (*AtFinalize)(void (*function)(void*), void* value, int* key);
  int (*CancelAtFinalize)(int key);

  Comm (*World)();
  // A communicator as a number: MPI's Fortran handle, or that of the standard ABI.
  Comm (*FromNumber)(int handle);
  int (*ToNumber)(Comm comm);
  int (*CommRank)(Comm comm, int* rank);
  int (*CommSize)(Comm comm, int* size);
  int (*CommTestInter)(Comm comm, int* is);
  // Whether both have the same ranks in the same order.
  int (*CommIsCongruent)(Comm a, Comm b, bool* is);
  int (*CommIdup)(Comm comm, Comm* made, Request* request);
  // A communicator of `count` ranges (first, last, stride) of ranks.
  int (*CommCreateGroup)(Comm comm, int count, int (*ranges)[3], int tag, Comm* made);
  int (*CommFree)(Comm* comm);
  int (*ReturnErrors)(Comm comm);  // in the place of its error handler
  int (*TakeHandlerOfWorld)(Comm comm);
  int (*HighestTag)(Comm comm, int* tag, bool* is_known);

  int (*Isend)(const void* memory, int bytes, int to, int tag, Comm comm, Request* request);
  int (*Irecv)(void* memory, int bytes, int from, int tag, Comm comm, Request* request);
  // Looks for a message of any source.
  int (*Improbe)(int tag, Comm comm, int* found, Message* message, Received* received);
  int (*Imrecv)(void* memory, int bytes, Message* message, Request* request);
  int (*Test)(Request* request, int* done, Received* received);  // null: of no interest
  int (*Cancel)(Request* request);
  int (*IallgatherSizes)(const std::uint64_t* mine, std::uint64_t* all, Comm comm,
                         Request* request);
  int (*IallgathervBytes)(const char* mine, int bytes, char* all, const int* counts,
                          const int* displacements, Comm comm, Request* request);
};

}  // namespace sirtaki::mpi

// The module's only symbol.
extern "C" const sirtaki::mpi::Api* sirtaki_mpi_api();
