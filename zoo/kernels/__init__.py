"""Kernels by name, of attention and of the products of a mixture's experts: what each can do, as data.

In: what a model asks for on a platform. Out: the kernel that suits it, or in a sentence why one cannot be had; and an
adapter, called as the plain function is.
"""

from zoo.kernels import attention as attention
from zoo.kernels import experts as experts
