# GPU support. CUDA and NCCL are opened at run time, so all of it is built everywhere but our own kernels: they need
# nvcc, and are put into the library as an image that CUDA's driver loads.
set(SIRTAKI_HAVE_KERNELS OFF)
# sm_75 to sm_120; later processors compile the last one's PTX when the image is loaded.
set(SIRTAKI_GPU_ARCHITECTURES "75;80;86;89;90;100;120" CACHE STRING "GPUs that the kernels are built for, without a dot")

if(SIRTAKI_CUDA STREQUAL "OFF")
  set(sirtaki_cuda_status "off: SIRTAKI_CUDA=OFF")
else()
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_NVCC_EXECUTABLE)
    # That of bootstrap.sh --cuda: a compiler, without the libraries that make a toolkit.
    file(GLOB sirtaki_nvcc "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu1*/bin/nvcc")
    if(sirtaki_nvcc)
      list(GET sirtaki_nvcc -1 CUDAToolkit_NVCC_EXECUTABLE)
      execute_process(COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" --version OUTPUT_VARIABLE sirtaki_nvcc_says)
      string(REGEX REPLACE ".*, V([0-9.]+).*" "\\1" CUDAToolkit_VERSION "${sirtaki_nvcc_says}")
    endif()
  endif()
  if(CUDAToolkit_NVCC_EXECUTABLE)
    set(SIRTAKI_HAVE_KERNELS ON)
    set(sirtaki_cuda_status "kernels by ${CUDAToolkit_NVCC_EXECUTABLE} ${CUDAToolkit_VERSION}")
    # An older one knows only older GPUs.
    execute_process(COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" --list-gpu-arch OUTPUT_VARIABLE sirtaki_nvcc_knows)
    set(sirtaki_architectures "")
    foreach(architecture IN LISTS SIRTAKI_GPU_ARCHITECTURES)
      if(sirtaki_nvcc_knows MATCHES "compute_${architecture}\n")
        list(APPEND sirtaki_architectures "${architecture}")
      else()
        string(APPEND sirtaki_cuda_status ", which does not know sm_${architecture}")
      endif()
    endforeach()
    if(NOT sirtaki_architectures)
      message(FATAL_ERROR "${CUDAToolkit_NVCC_EXECUTABLE} knows none of SIRTAKI_GPU_ARCHITECTURES=${SIRTAKI_GPU_ARCHITECTURES}.")
    endif()
    string(APPEND sirtaki_cuda_status ", CUDA and NCCL are opened at run time")
  else()
    set(sirtaki_cuda_status "off: no CUDA toolkit found")
    if(SIRTAKI_CUDA STREQUAL "ON")
      message(FATAL_ERROR "SIRTAKI_CUDA=ON, but no nvcc was found. Put it on PATH, set CUDAToolkit_ROOT, run bootstrap.sh --cuda, or use AUTO or OFF.")
    endif()
  endif()
endif()

# The file that holds the image, or says why there is none.
function(sirtaki_add_gpu_kernels target)
  set(folder "${PROJECT_SOURCE_DIR}/ops/cuda")
  if(NOT SIRTAKI_HAVE_KERNELS)
    target_sources(${target} PRIVATE "${folder}/kernel_image_none.cc")
    set_source_files_properties("${folder}/kernel_image_none.cc" PROPERTIES COMPILE_DEFINITIONS
      "SIRTAKI_CUDA_STATUS=\"${sirtaki_cuda_status}\"")
    return()
  endif()
  set(codes "")
  foreach(architecture IN LISTS sirtaki_architectures)
    list(APPEND codes "-gencode=arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  list(GET sirtaki_architectures -1 last)
  list(APPEND codes "-gencode=arch=compute_${last},code=compute_${last}")
  set(image "${PROJECT_BINARY_DIR}/sirtaki_kernels.fatbin")
  add_custom_command(OUTPUT "${image}"
    COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" -fatbin -Xfatbin=-compress-all -std=c++17 -O3 -I "${PROJECT_SOURCE_DIR}" ${codes}
      -o "${image}" "${folder}/kernels.cu"
    DEPENDS "${folder}/kernels.cu" "${folder}/kernel_tables.h" "${folder}/kernel_bodies.h"
    COMMENT "Building the GPU kernels"
    VERBATIM)
  target_sources(${target} PRIVATE "${folder}/kernel_image.cc")
  string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" toolkit "${CUDAToolkit_VERSION}")
  math(EXPR toolkit "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 10")   # as CUDA counts
  set_source_files_properties("${folder}/kernel_image.cc" PROPERTIES
    OBJECT_DEPENDS "${image}" COMPILE_DEFINITIONS "SIRTAKI_KERNEL_IMAGE=\"${image}\";SIRTAKI_KERNEL_TOOLKIT=${toolkit}")
endfunction()
