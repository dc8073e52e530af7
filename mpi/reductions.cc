#include "mpi/reductions.h"

#include "mpi/environment.h"
#include "ops/base/kernels.h"

namespace sirtaki::mpi {
namespace {

using core::DType;
using core::ReduceOp;

MPI_Datatype SignedType(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return MPI_INT8_T;
    case DType::kI16:
      return MPI_INT16_T;
    case DType::kI32:
      return MPI_INT32_T;
    default:
      return MPI_INT64_T;
  }
}

// Of the same size, unsigned where it is an integer: the bits of sums and products are the same,
// and those of MPI's C code wrap by definition.
MPI_Datatype WrappingType(DType dtype) {
  switch (dtype) {
    case DType::kU8:
    case DType::kI8:
    case DType::kBool:
      return MPI_UINT8_T;
    case DType::kI16:
      return MPI_UINT16_T;
    case DType::kI32:
      return MPI_UINT32_T;
    case DType::kI64:
      return MPI_UINT64_T;
    case DType::kF32:
      return MPI_FLOAT;
    case DType::kF64:
      return MPI_DOUBLE;
    default:
      break;
  }
  return MPI_DATATYPE_NULL;
}

bool IsOrder(ReduceOp op) { return op == ReduceOp::kMin || op == ReduceOp::kMax; }

MPI_Op OfMpi(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return MPI_SUM;
    case ReduceOp::kMin:
      return MPI_MIN;
    case ReduceOp::kMax:
      return MPI_MAX;
    case ReduceOp::kProduct:
      return MPI_PROD;
    case ReduceOp::kBitAnd:
      return MPI_BAND;
    case ReduceOp::kBitOr:
      return MPI_BOR;
    case ReduceOp::kBitXor:
      return MPI_BXOR;
    default:
      break;
  }
  return MPI_OP_NULL;
}

template <ReduceOp op, DType dtype>
void Combine(void* in, void* in_out, int* count, MPI_Datatype*) {
  ops::ReduceInto(op, dtype, in_out, in, *count);
}

struct Own {
  ReduceOp op;
  DType dtype;
  MPI_User_function* function;
};

template <ReduceOp op, DType dtype>
constexpr Own Make() {
  return {op, dtype, Combine<op, dtype>};
}

constexpr Own kOwn[] = {
    // Open MPI's MPI_SUM saturates 8- and 16-bit integers where it has AVX (128 + 128 is 255 as
    // uint8), and so does MPI_PROD, which its makers will not change:
    // github.com/open-mpi/ompi/issues/8045.
    Make<ReduceOp::kSum, DType::kU8>(),
    Make<ReduceOp::kSum, DType::kI8>(),
    Make<ReduceOp::kSum, DType::kI16>(),
    Make<ReduceOp::kProduct, DType::kU8>(),
    Make<ReduceOp::kProduct, DType::kI8>(),
    Make<ReduceOp::kProduct, DType::kI16>(),
    // MPI says nothing of NaN and of the order of zeros.
    Make<ReduceOp::kMin, DType::kF32>(),
    Make<ReduceOp::kMin, DType::kF64>(),
    Make<ReduceOp::kMax, DType::kF32>(),
    Make<ReduceOp::kMax, DType::kF64>(),
    // MPI's C++ booleans are not everywhere.
    Make<ReduceOp::kMin, DType::kBool>(),
    Make<ReduceOp::kMax, DType::kBool>(),
    Make<ReduceOp::kProduct, DType::kBool>(),
    Make<ReduceOp::kBitAnd, DType::kBool>(),
    Make<ReduceOp::kBitOr, DType::kBool>(),
    Make<ReduceOp::kBitXor, DType::kBool>(),
};

}  // namespace

Reductions::Reductions() {
  for (const Own& own : kOwn) {
    MPI_Op made = MPI_OP_NULL;
    // Refused: it stays MPI_OP_NULL, and its calls say so.
    MPI_Op_create(own.function, /*commute=*/1, &made);
    own_[{own.op, own.dtype}] = made;
  }
}

Reductions::~Reductions() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (Environment::HasFault() || finalized != 0) return;
  for (auto& [what, op] : own_) {
    if (op != MPI_OP_NULL) MPI_Op_free(&op);
  }
}

Reduction Reductions::For(ReduceOp op, DType dtype) const {
  if (!ops::HasReduction(op, dtype)) return {};
  const auto own = own_.find({op, dtype});
  if (own != own_.end()) return {WrappingType(dtype), own->second};
  const bool is_signed = core::IsInteger(dtype) && dtype != DType::kU8;
  return {IsOrder(op) && is_signed ? SignedType(dtype) : WrappingType(dtype), OfMpi(op)};
}

}  // namespace sirtaki::mpi
