// The image of builds with nvcc. The macros are the path of its output, and its version.
#include "ops/cuda/kernel_image.h"

asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global sirtaki_kernel_image\n"
    ".hidden sirtaki_kernel_image\n"
    "sirtaki_kernel_image:\n"
    ".incbin \"" SIRTAKI_KERNEL_IMAGE
    "\"\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" const unsigned char sirtaki_kernel_image[];

namespace sirtaki::ops::cuda {

const void* KernelImage(std::string* /*why*/) { return sirtaki_kernel_image; }
int KernelToolkit() { return SIRTAKI_KERNEL_TOOLKIT; }

}  // namespace sirtaki::ops::cuda
